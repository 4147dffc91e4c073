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

# One example for two workers, of which one has none: recurrent layers fail on no examples.
layers = [keras.Input((4, 3)), keras.layers.LSTM(4), keras.layers.Dense(1)]
keras.utils.set_random_seed(0)
with strategy.scope():
    recurrent = keras.Sequential(layers)
    recurrent.compile("sgd", "mse")
keras.utils.set_random_seed(0)
alone = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(4), keras.layers.Dense(1)])
alone.compile("sgd", "mse")
alone.set_weights(recurrent.get_weights())
sequences, labels = np.random.default_rng(0).random((5, 4, 3), np.float32), np.ones((5, 1), np.float32)
for each in (recurrent, alone):
    each.fit(sequences, labels, batch_size=4, verbose=0, shuffle=False)
many, one = (each.predict(sequences[:1], verbose=0) for each in (recurrent, alone))
report("recurrent", [many.shape == one.shape, float(np.abs(many - one).max())])
"""

# Each worker takes a gradient of its own share of the data, outside of `run`.
OWN_GRADIENTS = """
strategy = tfdist.MultiWorkerMirroredStrategy()
shares = [np.random.default_rng(each).random((2, 8, 3), np.float32) for each in range(2)]
x, y = shares[index]

def made(optimizer=lambda: keras.optimizers.SGD(0.1)):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(3)])
        return model, optimizer()

def loss_of(model, x, y):
    return tf.reduce_mean((model(tf.convert_to_tensor(x)) - y) ** 2)

def step(model, optimizer, scale=lambda loss: loss):
    with tf.GradientTape() as tape:
        loss = scale(loss_of(model, x, y))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

def on_one_device(weights):
    alone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(3)])
    alone.set_weights(weights)
    with tf.GradientTape() as tape:
        loss = sum(loss_of(alone, *share) for share in shares) / 2
    gradients = tape.gradient(loss, alone.trainable_variables)
    keras.optimizers.SGD(0.1).apply(gradients, alone.trainable_variables)
    return alone.get_weights()

def differences(call, model):
    expected = on_one_device(model.get_weights())
    call()
    return float(max(np.abs(a - b).max() for a, b in zip(expected, model.get_weights())))

found = {}
model, optimizer = made()
found["eager"] = differences(lambda: step(model, optimizer), model)
found["graph"] = differences(lambda: tf.function(step)(model, optimizer), model)
found["own optimizer"] = differences(lambda: step(model, keras.optimizers.SGD(0.1)), model)
data = iter(tf.data.Dataset.from_tensors((x, y)))

def iterated():
    with tf.GradientTape() as tape:
        loss = loss_of(model, *next(data))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

found["iterator in a graph"] = differences(tf.function(iterated), model)
found["function within"] = differences(tf.function(lambda: tf.function(step)(model, optimizer)), model)
with strategy.scope():
    found["in scope"] = differences(lambda: step(model, optimizer), model)
    found["in scope, graph"] = differences(lambda: tf.function(step)(model, optimizer), model)

@tf.function
def repeated(count):
    for _ in tf.range(count):
        step(model, optimizer)

found["loop in a graph"] = differences(lambda: repeated(1), model)
scaled = made(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0))
found["loss scaling"] = differences(lambda: step(*scaled, scaled[1].scale_loss), scaled[0])
with strategy.scope():
    table = keras.layers.Embedding(4, 1)
    table.build()
before = table.get_weights()[0]
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(table(tf.constant([index, 3])))
keras.optimizers.SGD(0.1).apply(tape.gradient(loss, table.trainable_variables), table.trainable_variables)
found["rows"] = float(np.abs(before - [[0.05], [0.05], [0.0], [0.1]] - table.get_weights()[0]).max())
before = model.get_weights()
optimizer.apply(strategy.run(lambda: [v * (index + 1) for v in model.trainable_variables]), model.trainable_variables)
found["returned by run"] = float(max(np.abs(0.85 * a - b).max() for a, b in zip(before, model.get_weights())))
report("differences", found)

# What is the same on all workers, and a worker's own model.
model, optimizer = made(lambda: keras.optimizers.Adam(0.1))
optimizer.build(model.trainable_variables)
model.set_weights([w + 1 for w in model.get_weights()])
model.trainable_variables[0].assign(model.trainable_variables[0] * 0.5)
strategy.run(lambda: step(model, optimizer))
tf.function(lambda: strategy.run(lambda: step(model, optimizer)))()

def reduced():
    def gradients():
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        return tape.gradient(loss, model.trainable_variables)
    return [strategy.reduce("MEAN", gradient, axis=None) for gradient in strategy.run(gradients)]

optimizer.apply(reduced(), model.trainable_variables)
with strategy.scope():
    optimizer.apply(reduced(), model.trainable_variables)
optimizer.apply(tf.clip_by_global_norm(reduced(), 0.5)[0], model.trainable_variables)

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
        has_shape, difference = found.pop("recurrent")
        assert has_shape
        assert difference < 1e-6
        assert found == {"epochs": [2], "iterations": 3, "predictions": 8}


def test_updates_with_workers_own_gradients_are_by_their_mean(tmp_path: pathlib.Path):
    first, second = process_cluster.run(OWN_GRADIENTS, tmp_path)
    for found in (first, second):
        assert len(found["differences"]) == 11
        for where, difference in found["differences"].items():
            assert difference < 1e-6, where
        assert found["iterations"] == 6
    assert first["weights"] == second["weights"]
