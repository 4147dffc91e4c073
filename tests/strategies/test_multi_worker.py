# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy on two real processes: the numbers of one device, and the chief's files.

All parts of the script run in the same two processes, and report under their own names.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import process_cluster

# The first test waits for all parts.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

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

whole_report = report

def reporting(part):
    return lambda key, value: whole_report(f"{part}/{key}", value)

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

def results(scope, optimizer, is_used, **options):
    model, logs = dense(optimizer, scope, **options), Logs()
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[logs]).history
    if not is_used:
        return [model.get_weights(), history, logs.batches]
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

def table(scope, optimizer):
    keras.utils.set_random_seed(3)
    with scope.scope():
        model = keras.Sequential([keras.Input((3,)), Rows(), keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", steps_per_execution=4)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

def compare(name, train):
    found = train(strategy)
    report(name, [np.asarray(part).tolist() for part in tf.nest.flatten(found)])
    # One device gives all workers the same numbers: the chief finds them.
    if index == 0:
        report("difference, " + name, largest(train(one_device), found))

report = reporting("numbers")
for name, optimizer in {"sgd": lambda: optimizers.SGD(0.1), "adam": lambda: optimizers.Adam(0.01)}.items():
    compare(f"rows of a table, several steps per execution, {name}", lambda scope: table(scope, optimizer))
for name, (optimizer, options) in cases.items():
    is_used = name in ("adam", "steps_per_execution", "sum, eagerly")  # the others are about updates
    compare(name, lambda scope: results(scope, optimizer, is_used, **options))
report("workers", strategy.extended._num_workers)
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

report = reporting("shown")
report("a metric that shows its variable", largest(shown_as_a_variable(one_device), shown_as_a_variable(strategy)))
"""

PROGRESS = """
report = reporting("progress")
import contextlib, io

def shown_by(verbose):
    model = dense(lambda: optimizers.SGD(0.1))
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        model.fit(x, y, epochs=2, **verbose)
        model.evaluate(x, y, **verbose)
        model.predict(x, **verbose)
    return bool(shown.getvalue())

report("progress bars", [shown_by(options) for options in ({}, {"verbose": "auto"}, {"verbose": 1}, {"verbose": 0})])
"""

# Before any part that sets a seed.
DATA = """
report = reporting("data")
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
"""

# Different data sets would wait for each other for ever. Last of all: it is an error.
DIFFERENT = """
report = reporting("data")
model = dense(lambda: optimizers.Adam(0.01))
try:
    model.fit(x[: 8 * (index + 1)], y[: 8 * (index + 1)], batch_size=8, verbose=0)
except ValueError as error:
    report("different", str(error))
"""

FILES = """
report = reporting("files")
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

CHECKPOINTS = """
report = reporting("checkpoints")
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

SCRIPT = PREPARED + DATA + NUMBERS + SHOWN + PROGRESS + CHECKPOINTS + FILES + DIFFERENT


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def outcomes(shared: pathlib.Path) -> list[dict[str, Any]]:
    return process_cluster.run(SCRIPT, shared, timeout_secs=560)


def of(part: str, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of one part of the script, of each worker."""
    prefix = f"{part}/"
    return [{key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)} for found in outcomes]


def test_numbers_are_those_of_one_device(outcomes: list[dict[str, Any]]):
    first, second = of("numbers", outcomes)
    assert first.pop("workers") == second.pop("workers") == 2
    assert len(second) == 8
    for name in second:
        assert first[f"difference, {name}"] < 1e-5, name
        for one, other in zip(first[name], second[name], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6, err_msg=name)


def test_a_metric_may_show_its_variable(outcomes: list[dict[str, Any]]):
    for found in of("shown", outcomes):
        assert found["a metric that shows its variable"] < 1e-4


def test_the_chief_alone_shows_progress_unless_asked(outcomes: list[dict[str, Any]]):
    first, second = of("progress", outcomes)
    assert first["progress bars"] == [True, True, True, False]
    assert second["progress bars"] == [False, False, True, False]


def test_checkpoint_managers_share_a_directory(outcomes: list[dict[str, Any]]):
    for found in of("checkpoints", outcomes):
        assert found["difference"] == 0


def test_every_example_is_used_once(outcomes: list[dict[str, Any]]):
    first, second = of("data", outcomes)
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


def test_the_chief_writes_and_everybody_reads(outcomes: list[dict[str, Any]], shared: pathlib.Path):
    first, second = of("files", outcomes)
    for found in (first, second):
        assert found["loaded"] == 0
        assert (found["epochs left"], found["epochs left on own disks"], found["iterations"]) == (2, 1, 18)
        assert "nowhere" in found["error"]
        assert found["own disk"] == []
    assert first["weights"] == second["weights"]
    assert first["weights on own disks"] == second["weights on own disks"]
    out = shared / "out"
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    events = {name for name in files if "events" in name}
    assert sorted(pathlib.Path(name).parent.name for name in events) == ["train", "validation"]
    exported = {name for name in files if name.startswith("exported/")}
    checkpoints = {f"checkpoints/{epoch}.keras" for epoch in (1, 2, 3)}
    assert files - events - exported == checkpoints | {"best.weights.h5", "log.csv", "model.keras"}
    assert len((out / "log.csv").read_text().splitlines()) == 4
    assert not (shared / "disk-1").exists()
