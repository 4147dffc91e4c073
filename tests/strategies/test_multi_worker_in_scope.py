# SPDX-License-Identifier: Apache-2.0
"""Calls of Keras in the scope of MultiWorkerMirroredStrategy and outside of it, by two workers."""

from __future__ import annotations

import pathlib

import process_cluster
import pytest

pytestmark = pytest.mark.processes

RESTORING = """
strategy = tfdist.MultiWorkerMirroredStrategy()
x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("stop")

with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    backup = lambda: keras.callbacks.BackupAndRestore(shared / "backup")
    try:
        model.fit(x, y, epochs=3, verbose=0, callbacks=[backup(), Stop()])
    except RuntimeError:
        report("epochs", model.fit(x, y, epochs=3, verbose=0, callbacks=[backup()]).epoch)
    report("iterations", int(model.optimizer.iterations))
    own = x * (index + 1)
    found = model.predict_on_batch(own)
    report("predictions", len(found))
    report("difference", float(np.abs(found - (own @ model.get_weights()[0] + model.get_weights()[1])).max()))
"""

# Each worker takes a gradient of its own share of the data, outside of `run`.
OWN_GRADIENTS = """
strategy = tfdist.MultiWorkerMirroredStrategy()
x, y = np.random.default_rng(index).random((2, 8, 3), np.float32)

def made(optimizer=lambda: keras.optimizers.SGD(0.1)):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        return model, optimizer()

def step(model, optimizer, scale=lambda loss: loss):
    with tf.GradientTape() as tape:
        loss = scale(tf.reduce_mean((model(tf.constant(x)) - y) ** 2))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[-1].strip()

refused = {}
model, optimizer = made()
before = model.get_weights()
refused["eager"] = refusal(lambda: step(model, optimizer))
refused["graph"] = refusal(lambda: tf.function(step)(model, optimizer))
refused["own optimizer"] = refusal(lambda: step(model, keras.optimizers.SGD(0.1)))
data = iter(tf.data.Dataset.from_tensors(x))

def iterated():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(next(data)) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

refused["iterator in a graph"] = refusal(tf.function(iterated))
refused["function within"] = refusal(tf.function(lambda: tf.function(step)(model, optimizer)))
with strategy.scope():
    refused["in scope"] = refusal(lambda: step(model, optimizer))
    refused["in scope, graph"] = refusal(lambda: tf.function(step)(model, optimizer))
scaled = made(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0))
refused["loss scaling"] = refusal(lambda: step(*scaled, scaled[1].scale_loss))
refused["of replicas"] = refusal(lambda: optimizer.apply(
    strategy.run(lambda: [v * (index + 1) for v in model.trainable_variables]), model.trainable_variables))
report("refused", refused)
report("changed", float(sum(np.abs(a - b).sum() for a, b in zip(before, model.get_weights()))))

# What is the same on all workers, and a worker's own model, are not.
model, optimizer = made(lambda: keras.optimizers.Adam(0.1))
optimizer.build(model.trainable_variables)
model.set_weights([w + 1 for w in model.get_weights()])
model.trainable_variables[0].assign(model.trainable_variables[0] * 0.5)
strategy.run(lambda: step(model, optimizer))
tf.function(lambda: strategy.run(lambda: step(model, optimizer)))()

def reduced():
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(tf.constant(x)) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)
    return [strategy.reduce("MEAN", gradient, axis=None) for gradient in strategy.run(gradients)]

optimizer.apply(reduced(), model.trainable_variables)
with strategy.scope():
    optimizer.apply(reduced(), model.trainable_variables)

@tf.function
def clipped(limit):
    gradients, norm = tf.clip_by_global_norm(reduced(), 0.5)
    if norm > 0.0:
        optimizer.apply([g + 0.01 * v for g, v in zip(gradients, model.trainable_variables)], model.trainable_variables)

clipped(tf.constant(0.5))
report("iterations", int(optimizer.iterations))
report("weights", [w.tolist() for w in model.get_weights()])
alone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
step(alone, keras.optimizers.SGD(0.1))
tf.function(step)(alone, keras.optimizers.SGD(0.1))
"""


def test_fit_in_scope_restores_and_predicts_once(tmp_path: pathlib.Path):
    for found in process_cluster.run(RESTORING, tmp_path):
        assert found.pop("difference") < 1e-6
        assert found == {"epochs": [2], "iterations": 3, "predictions": 8}


def test_updates_with_a_workers_own_gradients_are_refused(tmp_path: pathlib.Path):
    first, second = process_cluster.run(OWN_GRADIENTS, tmp_path)
    for found in (first, second):
        assert len(found["refused"]) == 9
        for where, message in found["refused"].items():
            assert message is not None, where
            assert "optimizer.apply" in message, where
            assert "Call it in a step that strategy.run is given" in message, where
        assert found["changed"] == 0
        assert found["iterations"] == 5
    assert first["weights"] == second["weights"]
