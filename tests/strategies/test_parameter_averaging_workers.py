# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy with ParameterAveraging, on real processes: right numbers, few bytes, equal weights."""

from __future__ import annotations

import pathlib

import process_cluster
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# 45 examples in batches of 8: the last batch has 5, which two workers don't share evenly.
PREPARED = """
rng = np.random.default_rng(0)
x, y = rng.random((45, 3), np.float32), rng.random((45, 1), np.float32)
layers, optimizers = keras.layers, keras.optimizers

def dense(scope, optimizer=lambda: optimizers.SGD(0.1), between=lambda: (), **options):
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(8, "relu"), *between(), layers.Dense(1)])
        model.compile(optimizer(), **{"loss": "mse", "metrics": ["mae"], **options})
    return model

def values(variables):
    return [np.asarray(variable).tolist() for variable in variables]
"""

PERIODS = """
strategy = tfdist.MultiWorkerMirroredStrategy(
    start_timeout_secs=60, policies=[tfdist.ParameterAveraging(4, optimizer_state="local")])

def on_all(name, model):
    report(name, values([*model.weights]))

class Looks(keras.callbacks.Callback):
    seen = 0
    def on_epoch_end(self, epoch, logs=None):
        on_all(f"epoch {epoch}", self.model)
        report(f"logs {epoch}", logs)
        if index == 0:
            # By one worker alone: nobody else is asked.
            self.model.optimizer.iterations.numpy()
    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == 9:
            # In the third step of a period the workers differ.
            report("apart", values(self.model.weights))
            keras.saving.save_model(self.model, shared / "in the middle.keras")
            on_all("after saving", self.model)
            loaded = keras.models.load_model(shared / "in the middle.keras")
            on_all("loaded", loaded)

between = lambda: (layers.BatchNormalization(), layers.Dropout(0.2))
model = dense(strategy, lambda: optimizers.Adam(0.01), between)
callbacks = [
    Looks(),
    keras.callbacks.ModelCheckpoint(shared / "at {epoch} {batch}.weights.h5", save_freq=5, save_weights_only=True),
    keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True, patience=0),
    keras.callbacks.BackupAndRestore(shared / "backup"),
]
history = model.fit(
    x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y), callbacks=callbacks, shuffle=False).history
report("history", history)
on_all("weights", model)
report("iterations", int(model.optimizer.iterations.numpy()))
report("evaluated", model.evaluate(x, y, batch_size=8, verbose=0))
report("updates", strategy.report().updates)

# The data end unannounced, in the middle of a period; and an endless one of each worker's own.
def generate():
    for start in range(0, 45, 8):
        yield x[start:start + 8], y[start:start + 8]
signature = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32))
unknown = tf.data.Dataset.from_generator(generate, output_signature=signature)
model = dense(strategy, lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1), between, steps_per_execution=3)
model.fit(unknown, epochs=2, verbose=0)
on_all("unknown", model)
model, before = dense(strategy, lambda: optimizers.Adam(0.01)), strategy.report().updates
model.fit(unknown, epochs=2, verbose=0)
report("counted", [int(model.optimizer.iterations.numpy()), strategy.report().updates - before])
own = strategy.distribute_datasets_from_function(
    lambda context: tf.data.Dataset.from_tensor_slices((x, y)).shard(2, context.input_pipeline_id).repeat().batch(5))
model.fit(own, epochs=2, steps_per_epoch=5, verbose=0)
on_all("own", model)
model.train_on_batch(x, y)
on_all("on batch", model)
try:
    strategy.experimental_distribute_dataset(unknown, tf.distribute.InputOptions())
except ValueError as error:
    report("refused", str(error))
"""


def test_what_anybody_looks_at_is_the_average(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + PERIODS, tmp_path, timeout_secs=250)
    assert first["apart"] != second["apart"]
    for name in first.keys() - {"apart"}:
        # To the last bit, and the logs too.
        assert first[name] == second[name], name
    assert first["loaded"] == first["after saving"]
    assert first["history"]["loss"] == [
        first[f"logs {epoch}"]["loss"] for epoch in range(len(first["history"]["loss"]))
    ]
    assert first["iterations"] == first["updates"] == 6 * len(first["history"]["loss"])
    # The step that Keras tries at the end is none.
    assert first["counted"] == [12, 12]
    assert "AutoShardPolicy" in first["refused"] and "InputOptions" in first["refused"]


SENT = """
import traffic
policy = tfdist.ParameterAveraging(4, outer=lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[policy])
with strategy.scope():
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
data = tf.data.Dataset.from_tensors((tf.random.stateless_normal((8, 300), [0, 1]), tf.ones((8, 1)))).repeat()
model.fit(data, steps_per_epoch=4, verbose=0)

class Counts(keras.callbacks.Callback):
    sent = [traffic.sent_by_this_process()]
    def on_train_batch_end(self, batch, logs=None):
        self.sent.append(traffic.sent_by_this_process())
counts, told = Counts(), strategy.report().message_bytes
model.fit(data, steps_per_epoch=40, verbose=0, callbacks=[counts])
report("sent", counts.sent[-1] - counts.sent[0])
report("told", {name: sent - told[name] for name, sent in strategy.report().message_bytes.items()})
report("weights", [weight.tolist() for weight in model.get_weights()])
"""


@pytest.mark.slow
def test_one_sum_is_all_that_is_sent(tmp_path: pathlib.Path):
    script = f"import sys; sys.path.insert(0, {str(process_cluster.ROOT / 'benchmarks')!r})\n" + SENT
    first, second = process_cluster.run(script, tmp_path, timeout_secs=250)
    assert first["weights"] == second["weights"]
    # Ten averages of the parameters, and of the two numbers in which the loss counts.
    expected = 10 * 4 * (300 * 300 + 300 + 300 + 1 + 2)
    assert first["told"] == second["told"] == {"worker:0": expected, "worker:1": expected}
    for each in (first, second):
        assert expected <= each["sent"] <= 1.05 * expected
