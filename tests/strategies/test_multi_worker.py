# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy on two real processes: the numbers of one device, and the chief's files."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import process_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# 45 examples in batches of 8: the last batch has 5, which two workers can't share evenly.
PREPARED = """
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
one_device = tf.distribute.get_strategy()
rng = np.random.default_rng(0)
x, y = rng.random((45, 3), np.float32), rng.random((45, 1), np.float32)
optimizers, callbacks = keras.optimizers, keras.callbacks

def dense(optimizer, scope=strategy, layers=(), **options):
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), *layers, keras.layers.Dense(1)])
        model.compile(optimizer(), **{"loss": "mse", "metrics": ["mae"], **options})
    return model

def largest(a, b):
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return max(float(np.abs(np.asarray(u) - np.asarray(v)).max()) for u, v in pairs)
"""

NUMBERS = """
class Logs(callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.batches = []
    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

def results(scope, optimizer, **options):
    model, logs = dense(optimizer, scope, **options), Logs()
    history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[logs]).history
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    return [model.get_weights(), history, logs.batches, evaluated, model.predict(x, batch_size=8, verbose=0)]

cases = {
    "sgd": (lambda: optimizers.SGD(0.1), {}),
    "adam": (lambda: optimizers.Adam(0.01), {}),
    "accumulation, clipping, ema": (
        lambda: optimizers.SGD(
            0.1, clipnorm=0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3), {}),
    "loss scale": (lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, global_clipnorm=0.1)), {}),
    "steps_per_execution": (lambda: optimizers.Adam(0.01), {"steps_per_execution": 4}),
    "sum, eagerly": (
        lambda: optimizers.SGD(0.01), {"loss": keras.losses.MeanSquaredError(reduction="sum"), "run_eagerly": True}),
}
class Rows(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(5, 3), name="table")
    def call(self, x):
        return keras.ops.take(self.table, keras.ops.cast(x * 5, "int32"), axis=0)

def table(scope):
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = keras.Sequential([keras.Input((3,)), Rows(), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(optimizers.SGD(0.1), "mse", steps_per_execution=4)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

report("workers", strategy.extended._num_workers)
report("rows of a table, several steps per execution", largest(table(one_device), table(strategy)))
for name, (optimizer, options) in cases.items():
    report(name, largest(results(one_device, optimizer, **options), results(strategy, optimizer, **options)))
"""

SHOWN = """
class Total(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_variable((), "zeros", name="total")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_pred))
    def result(self):
        return self.total

def shown_as_a_variable(scope):
    with scope.scope():
        model = dense(lambda: optimizers.SGD(0.1), scope)
        model.compile("sgd", "mse", metrics=[Total()])
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [history, model.evaluate(x, y, batch_size=8, verbose=0)]

report("a metric that shows its variable", largest(shown_as_a_variable(one_device), shown_as_a_variable(strategy)))
"""

DATA = """
# Keras' unseeded shuffle of arrays, whose order must be the same on all workers.
seen = []
class Seeing(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(name="scale")
    def call(self, x):
        return x * self.scale
    def train_step(self, data):
        seen.append(np.asarray(data[0])[:, 0].tolist())
        return {"rows": float(len(data[0]))}
with strategy.scope():
    model = Seeing()
    model.compile("sgd", "mse", run_eagerly=True)
numbers = np.arange(21, dtype=np.float32)[:, None]
model.fit(numbers, numbers, batch_size=8, epochs=1, verbose=0)
seen.clear()  # Keras built the model from a batch
model.fit(numbers, numbers, batch_size=8, epochs=2, verbose=0)
report("shares", seen)

# Unknown length, a last batch of a single example, dicts.
def generate():
    for start in range(0, 17, 8):
        yield {"a": numbers[start:min(start + 8, 17)]}
signature = {"a": tf.TensorSpec((None, 1), tf.float32)}
generated = tf.data.Dataset.from_generator(generate, output_signature=signature)
with strategy.scope():
    doubling = keras.Model(a := keras.Input((1,), name="a"), keras.layers.Rescaling(2.0)(a))
    doubling.compile(loss="mse", metrics=["mae"])
report("predicted", doubling.predict(generated, verbose=0)[:, 0].tolist())
pairs = generated.map(lambda batch: (batch, 0 * batch["a"]))
report("evaluated", doubling.evaluate(pairs, verbose=0)[1])

model = dense(lambda: optimizers.Adam(0.01))
model.fit(tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True).batch(8), epochs=3, verbose=0)
report("iterations", [int(copy.numpy()) for copy in model.optimizer.iterations.value.values])

# Batch normalization, and a batch with fewer examples than workers.
model = dense(lambda: optimizers.Adam(0.01), layers=[keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
history = model.fit(x[:9], y[:9], batch_size=8, epochs=2, verbose=0, validation_split=0.2).history
report("finite", bool(np.isfinite(tf.nest.flatten(history)).all()))
report("weights", [weight.tolist() for weight in model.get_weights()])

# Single batches and a custom loop.
model = dense(lambda: optimizers.Adam(0.01))
report("losses", [float(model.train_on_batch(x, y)[0]) for _ in range(5)])
report("single", largest(model.test_on_batch(x, y), model.evaluate(x, y, verbose=0)))
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x) - y) ** 2) / 8
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}
@tf.function
def global_step(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
report("custom", [float(global_step(batch)["loss"]) for batch in batches])

# Different data sets would wait for each other for ever.
try:
    model.fit(x[: 8 * (index + 1)], y[: 8 * (index + 1)], batch_size=8, verbose=0)
except ValueError as error:
    report("different", str(error))
"""

FILES = """
out = shared / "out"
model = dense(lambda: optimizers.Adam(0.01), layers=[keras.layers.BatchNormalization()])
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_split=0.2, callbacks=[
    callbacks.ModelCheckpoint(out / "checkpoints" / "{epoch}.keras"),
    callbacks.ModelCheckpoint(out / "best.weights.h5", save_weights_only=True, save_best_only=True),
    callbacks.BackupAndRestore(out / "backup", delete_checkpoint=False),
    callbacks.TensorBoard(out / "board"), callbacks.CSVLogger(out / "log.csv")]).history
model.save(out / "model.keras")
# At once: when save returns, the chief's file is complete.
with strategy.scope():
    loaded = keras.saving.load_model(out / "model.keras")
report("loaded", largest(loaded.predict(x, verbose=0), model.predict(x, verbose=0)))
resume = callbacks.BackupAndRestore(out / "backup")
rest = loaded.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=[resume]).history
report("epochs left", len(rest["loss"]))
report("weights", [weight.tolist() for weight in loaded.get_weights()])
try:
    model.save(out / "nowhere" / "model.keras")
except OSError as error:
    report("error", str(error))
model.export(out / "exported", verbose=False)
# A file system of its own: only the chief finds its backup, all go on from it.
own = shared / f"disk-{index}"
model = dense(lambda: optimizers.Adam(0.01))
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[callbacks.BackupAndRestore(own, delete_checkpoint=False)])
again = dense(lambda: optimizers.Adam(0.01))
rest = again.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[callbacks.BackupAndRestore(own)]).history
report("epochs left on own disks", len(rest["loss"]))
report("iterations", int(again.optimizer.iterations.numpy()))
report("weights on own disks", [weight.tolist() for weight in again.get_weights()])
report("own disk", sorted(path.name for path in own.glob("*")))
"""


def test_numbers_are_those_of_one_device(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + NUMBERS, tmp_path, timeout_secs=200)
    assert first["workers"] == 2
    for name in first.keys() - {"workers"}:
        assert max(first[name], second[name]) < 1e-5, name


def test_a_metric_may_show_its_variable(tmp_path: pathlib.Path):
    for found in process_cluster.run(PREPARED + SHOWN, tmp_path, timeout_secs=200):
        assert found["a metric that shows its variable"] < 1e-4


CHECKPOINTS = """
with strategy.scope():
    model = dense(lambda: optimizers.Adam(0.01))
manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(shared / "checkpoints"), max_to_keep=2)
for number in range(8):
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    path = manager.save()
    manager.checkpoint.restore(path).assert_existing_objects_matched()
expected = model.get_weights()
model.set_weights([weight * 0 for weight in expected])
manager.restore_or_initialize()
report("difference", largest(expected, model.get_weights()))
"""


def test_checkpoint_managers_share_a_directory(tmp_path: pathlib.Path):
    for found in process_cluster.run(PREPARED + CHECKPOINTS, tmp_path, timeout_secs=200):
        assert found["difference"] == 0


def test_every_example_is_used_once(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + DATA, tmp_path, timeout_secs=200)
    for epoch in range(2):
        steps = slice(3 * epoch, 3 * epoch + 3)
        used = [number for part in first["shares"][steps] + second["shares"][steps] for number in part]
        assert sorted(used) == list(range(21))
        assert used != list(range(21))
    for found in (first, second):
        assert found["predicted"] == [2.0 * number for number in range(17)]
        assert found["evaluated"] == pytest.approx(np.mean(found["predicted"]))
        assert found["iterations"] == [18]
        assert found["finite"]
        assert found["losses"][-1] < found["losses"][0]
        assert found["single"] < 1e-6
        assert "(8, 3)" in found["different"] and "(16, 3)" in found["different"]
    assert first["weights"] == second["weights"]
    assert first["custom"] == second["custom"]


def test_the_chief_writes_and_everybody_reads(tmp_path: pathlib.Path):
    first, second = process_cluster.run(PREPARED + FILES, tmp_path, timeout_secs=200)
    for found in (first, second):
        assert found["loaded"] == 0
        assert (found["epochs left"], found["epochs left on own disks"], found["iterations"]) == (2, 1, 18)
        assert "nowhere" in found["error"]
        assert found["own disk"] == []
    assert first["weights"] == second["weights"]
    assert first["weights on own disks"] == second["weights on own disks"]
    out = tmp_path / "out"
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    events = {name for name in files if "events" in name}
    assert sorted(pathlib.Path(name).parent.name for name in events) == ["train", "validation"]
    exported = {name for name in files if name.startswith("exported/")}
    checkpoints = {f"checkpoints/{epoch}.keras" for epoch in (1, 2, 3)}
    assert files - events - exported == checkpoints | {"best.weights.h5", "log.csv", "model.keras"}
    assert len((out / "log.csv").read_text().splitlines()) == 4
    assert not (tmp_path / "disk-1").exists()
