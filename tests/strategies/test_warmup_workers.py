# SPDX-License-Identifier: Apache-2.0
"""Warmup under MultiWorkerMirroredStrategy, on real processes: who waits does nothing, and then all are equal."""

from __future__ import annotations

import pathlib

import process_cluster
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# 45 examples in batches of 8: six steps, the last of 5 examples, which two workers can't share evenly.
PREPARED = """
rng = np.random.default_rng(0)
x, y = rng.random((45, 3), np.float32), rng.random((45, 1), np.float32)

def dense(scope, *layers, made=keras.Sequential, **options):
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = made([keras.Input((3,)), keras.layers.Dense(8, "relu"), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), **{"loss": "mse", "metrics": ["mae"], **options})
    return model

def state(model):
    return [keras.ops.convert_to_numpy(v).tolist() for v in (*model.variables, *model.optimizer.variables)]
"""

# The second worker takes its first step only when the first one has made all of the phase.
ALONE = """
import time
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.Warmup(steps=5)])
model = dense(strategy, keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
done, seen, own_iterations = shared / "phase", [], []

def local(variable):
    return variable.value.values[0].numpy()

class Watch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        deadline = time.monotonic() + 60
        while index == 1 and not done.exists():
            assert time.monotonic() < deadline, "the first worker's phase needs the second one"
            time.sleep(0.01)
    def on_train_batch_end(self, batch, logs=None):
        seen.append(strategy.replicas_to_aggregate)
        own_iterations.append(int(local(model.optimizer.iterations)))
        if index == 0 and len(seen) == 5:
            done.touch()

callbacks = [Watch(), keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, min_delta=1.0, patience=1),
    keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=1.0, patience=3)]
history = model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=callbacks, validation_data=(x, y)).history
report("history", history)
report("state", state(model))
report("seen", seen)
report("own iterations", own_iterations)
report("accepted", strategy.report().accepted)
"""

# Only the first worker sees what happens in the phase, and stops there; its logs are no metrics.
STOPPED = """
class Own(keras.Sequential):
    def train_step(self, data):
        features, target = data
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((self(features, training=True) - target) ** 2)
        error_of_all = error / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(error, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": error_of_all}

warmup = tfdist.Warmup(steps=14)
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[warmup])
model = dense(strategy, made=Own, loss=None, metrics=None)

class StopAt2(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and logs["error"] > 0:
            self.model.stop_training = True

first = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[StopAt2()] if index == 0 else [])
report("first", first.history)
report("begun", warmup.begun)
stopping = keras.callbacks.EarlyStopping(monitor="error", mode="min", min_delta=100.0, patience=2)
second = model.fit(x, y, batch_size=8, epochs=8, verbose=0, callbacks=[stopping])
report("second", second.history)
report("state", state(model))
"""

# The first worker stays in the phase until it is killed.
KILLED = """
import time
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.Warmup(epochs=2)])
strategy.distribution.agreement.reporter.interval_secs = 1.0
model = dense(strategy)
def wait(batch, logs):
    while index == 0:
        time.sleep(0.01)
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=wait)])
"""


def test_who_waits_does_no_step_and_then_all_are_equal(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + ALONE, tmp_path, timeout_secs=250)
    # To the last bit: weights, statistics, seeds, slots, the learning rate that a callback has changed.
    assert first["state"] == second["state"]
    assert first["history"] == second["history"]
    assert len(first["history"]["loss"]) == 4
    assert first["seen"] == second["seen"] == [1] * 5 + [2] * 19
    assert first["own iterations"] == list(range(1, 25))
    # In the phase the second one's optimizer was never called.
    assert second["own iterations"] == [0] * 5 + list(range(6, 25))
    assert first["accepted"] == second["accepted"] == {"worker:0": 24, "worker:1": 19}


@pytest.mark.slow
def test_a_stop_in_the_phase_is_one_of_all(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + STOPPED, tmp_path, timeout_secs=250)
    assert first == second
    assert first["begun"] == 3
    assert len(first["first"]["error"]) == 1
    assert len(first["second"]["error"]) == 3


def test_who_waits_says_for_whom_and_ends_if_that_one_dies(tmp_path: pathlib.Path):
    with process_cluster.workers(PREPARED + KILLED, tmp_path) as (first, second):
        second.wait_for_output("waiting for worker:0", timeout_secs=120)
        assert "worker:0's warmup phase has not completed" in second.output
        first.process.kill()
        assert second.wait(100) != 0
