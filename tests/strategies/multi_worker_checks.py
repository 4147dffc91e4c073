# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy without a policy, on two workers: data, variables, files and progress bars.

Both workers run each check; `both` gives each what the two have found. Run by `test_multi_worker_conformance.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import slow_workers
import tensorflow as tf
import training
from training import OPTIMIZERS, X, Y, assert_close, dense_model

import tfdist
from tfdist.compat.tensorflow import context

CALLBACKS = keras.callbacks
NUMBERS = np.arange(21, dtype=np.float32)[:, None]

Both = Callable[[Any], list[Any]]
compiled = functools.partial(training.compiled, optimizer=lambda: OPTIMIZERS.Adam(0.01))


def index() -> int:
    task = tfdist.Cluster.from_environment().task
    assert task
    return task.index


def normalized() -> keras.Model:
    hidden = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1)])


def test_fork_of_a_worker_ends_on_sigterm(strategy: Any) -> None:
    """TensorFlow's runtime handles the signal here; a pool that ends its processes would wait for ever."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    try:
        process.terminate()
        process.join(30)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()


# Data.


def test_random_states_are_those_of_the_chief_from_the_start(first_draws: list[float], both: Both) -> None:
    one, other = both(first_draws)
    assert one == other


def test_every_example_of_a_shuffle_is_used_once(strategy: Any, both: Both) -> None:
    """Keras' unseeded shuffle of arrays, whose order must be the same on all workers."""
    seen: list[list[float]] = []

    class Seeing(keras.Model):
        def __init__(self) -> None:
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
    model.fit(NUMBERS, NUMBERS, batch_size=8, epochs=1, verbose=0)
    seen.clear()  # Keras built the model from a batch
    model.fit(NUMBERS, NUMBERS, batch_size=8, epochs=2, verbose=0)
    first, second = both(seen)
    for steps in (slice(0, 3), slice(3, 6)):
        used = [number for part in first[steps] + second[steps] for number in part]
        assert sorted(used) == list(range(21))
        assert used != list(range(21))


def test_gather_traces_once_for_values_of_all_lengths(strategy: Any) -> None:
    start = index()
    strategy._gathers.clear()
    for step in (1, 2, 3):
        gathered = strategy.gather(tf.range(start + step, dtype=tf.float32), axis=0)
        assert gathered.numpy().tolist() == [*range(step), *range(step + 1)]
    assert [each.experimental_get_tracing_count() for each in strategy._gathers.values()] == [1]
    gathered = strategy.gather(tf.fill([2, start + 1], start), axis=1)
    assert gathered.numpy().tolist() == [[0, 1, 1]] * 2


def with_policy(data: tf.data.Dataset, name: str) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    return data.with_options(options)


def lines(directory: pathlib.Path) -> tf.data.Dataset:
    """Pairs of the numbers in three files: the workers have different numbers of them."""
    paths = [directory / f"{number}.txt" for number in range(3)]
    if index() == 0:
        for number, path in enumerate(paths):
            path.write_text("\n".join(str(each) for each in range(7 * number, 7 * number + 7)))
    read = tf.data.TextLineDataset([str(path) for path in paths])
    doubled = read.map(lambda line: tf.reshape(tf.strings.to_number(line), [1])).map(
        lambda number: (number, 0 * number)
    )
    return doubled.batch(4)


@functools.cache
def doubling_of(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Rescaling(2.0), keras.layers.Dense(1, use_bias=False)]
        )
        model.compile(keras.optimizers.SGD(0.0), loss="mse", metrics=[lambda y, predicted: y])
    model.set_weights([np.ones((1, 1), np.float32)])
    return model


@pytest.fixture
def doubling(strategy: Any) -> keras.Model:
    """A model that learns nothing: all checks have the same one, which is traced once."""
    return doubling_of(strategy)


def means(model: keras.Model, data: Any) -> list[float]:
    """The mean of the targets that `evaluate` and two epochs of `fit` use."""
    (key,) = set(model.evaluate(data, verbose=0, return_dict=True)) - {"loss"}
    fitted = model.fit(data, epochs=2, verbose=0).history[key]
    return [model.evaluate(data, verbose=0, return_dict=True)[key], *fitted]


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((NUMBERS, NUMBERS))


def test_equal_data_sets_that_are_not_sharded_are_divided(doubling: keras.Model) -> None:
    """As a warning of TensorFlow's advises: every worker has all data."""
    data = with_policy(pairs().map(lambda x, y: (x + 0, y)).batch(4), "OFF")
    assert means(doubling, data) == pytest.approx([10.0] * 3)
    np.testing.assert_allclose(doubling.predict(data, verbose=0), 2 * NUMBERS)


def test_own_data_sets_of_different_lengths_are_all_used(strategy: Any, doubling: keras.Model) -> None:
    """Worker 0 has 15 examples in 4 batches, and the other one 6 in 2; steps are traced for data of all before."""
    doubling.fit(pairs().batch(4), verbose=0)
    own = pairs().skip(15) if index() else pairs().take(15)
    steps: list[int] = []
    count = CALLBACKS.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    data = with_policy(own.batch(4), "OFF")
    assert means(doubling, data) == pytest.approx([10.0] * 3)
    doubling.fit(data, verbose=0, callbacks=[count])
    assert len(steps) == 8
    assert means(doubling, strategy.distribute_datasets_from_function(lambda _: own.batch(4))) == [10.0] * 3
    with pytest.raises(ValueError, match=r"^predict: each worker has other examples, .*Received: AutoShardPolicy.OFF"):
        doubling.predict(data, verbose=0)


def test_data_of_which_nobody_knows_whose_they_are_are_refused(
    strategy: Any, doubling: keras.Model, both: Both, tmp_path: pathlib.Path
) -> None:
    lines(tmp_path)
    both(None)  # the files are written
    signature = (tf.TensorSpec([1]), tf.TensorSpec([1]))
    numbers = ((number, number) for number in NUMBERS)
    generated = tf.data.Dataset.from_generator(lambda: numbers, output_signature=signature)
    for make, message in (
        (lambda: with_policy(generated.batch(4), "OFF"), "a Python generator, or what is too large, may be"),
        (lambda: with_policy(pairs().batch(4), "HINT"), "AutoShardPolicy.HINT and without dataset.shard"),
        (lambda: with_policy(pairs().batch(4), "OFF" if index() else "AUTO"), "must be given the same data set"),
        (
            lambda: pairs().take(20 + index()).batch(4),
            r"remove x\[rank::n\] .*Received: batches 5 on worker:0, batches 6 on worker:1$",
        ),
        (lambda: pairs().shuffle(40, seed=index()).batch(4), "give shuffle the same seed on all"),
        (lambda: tf.data.Dataset.from_tensor_slices((NUMBERS[index() : 20 : 2],) * 2).batch(4), "another batch 0 on"),
    ):
        with pytest.raises(ValueError, match=f"^dataset: .*{message}"):
            doubling.fit(make(), verbose=0)
    for own in (NUMBERS[index() : 20 : 2], NUMBERS[index() :: 2]):
        with pytest.raises(ValueError, match=f"^dataset: .*another batch 0 on worker:{index()} than on worker:"):
            doubling.predict(own, verbose=0)
    share = tf.data.Dataset.from_tensor_slices(NUMBERS[index() : 20 : 2]).batch(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"dataset: .*another batch 0 on"):
        next(iter(strategy.experimental_distribute_dataset(share)))
    # Keras shuffles arrays by the global seed.
    before = context.global_seed()
    tf.random.set_seed(index())
    try:
        with pytest.raises(ValueError, match=r"^dataset: .*give shuffle the same seed on all.* another batch 0 on"):
            doubling.fit(NUMBERS, NUMBERS, batch_size=4, verbose=0)
    finally:
        tf.random.set_seed(before)
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    share, shorter = NUMBERS[index() : 20 : 2], NUMBERS[: 20 - 5 * index()]
    for own, message in ((share, "another batch 0 on"), (shorter, "batches 5 on worker:0, batches 4 on worker:1$")):
        with pytest.raises(ValueError, match=rf"^dataset: .*{message}"):
            data = {"validation_data": (own, own), "validation_batch_size": 4}
            doubling.fit(NUMBERS, NUMBERS, batch_size=4, verbose=0, callbacks=[count], **data)
    assert len(steps) == 12
    endless = pairs().batch(4).repeat() if index() else pairs().batch(4)
    with pytest.raises(
        ValueError, match=r"must have an end, or none.*Received: endless False on worker:0, endless True"
    ):
        strategy.distribute_datasets_from_function(lambda _: endless)


@pytest.mark.slow
def test_shards_of_a_hint_are_all_used(doubling: keras.Model) -> None:
    hint = tf.data.experimental.SHARD_HINT
    data = with_policy(pairs().shard(hint, hint).batch(4), "HINT")
    assert means(doubling, data) == pytest.approx([10.0] * 3)
    with pytest.raises(ValueError, match=r"^predict: each worker has other examples, .*Received: AutoShardPolicy.HINT"):
        doubling.predict(data, verbose=0)


def test_files_are_read_once_and_predicted_in_order(tmp_path: pathlib.Path, both: Both, doubling: keras.Model) -> None:
    data = with_policy(lines(tmp_path), "FILE")
    both(None)  # the files are written
    assert doubling.evaluate(data, verbose=0)[0] == pytest.approx(np.mean((2 * NUMBERS) ** 2))
    np.testing.assert_allclose(doubling.predict(data, verbose=0), 2 * NUMBERS)


# Variables.


def test_variables_of_every_dtype_begin_as_on_the_chief(strategy: Any) -> None:
    for dtype in ("int8", "uint8", "int16", "uint32", "bfloat16", "float16", "int64", "bool"):
        with strategy.scope():
            variable = tf.Variable(tf.cast([1 - index(), 1], dtype))
        assert variable.dtype.name == dtype
        assert tf.cast(variable, "int32").numpy().tolist() == [1, 1]


# Files.


def test_the_chief_writes_and_everybody_reads(strategy: Any, both: Both, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    model = compiled(strategy, normalized)
    callbacks = [
        CALLBACKS.ModelCheckpoint(out / "checkpoints" / "{epoch}.keras"),
        CALLBACKS.ModelCheckpoint(out / "best.weights.h5", save_weights_only=True, save_best_only=True),
        CALLBACKS.BackupAndRestore(out / "backup", delete_checkpoint=False),
        CALLBACKS.TensorBoard(out / "board"),
        CALLBACKS.CSVLogger(out / "log.csv"),
    ]
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, validation_split=0.2, callbacks=callbacks)
    model.save(out / "model.keras")
    # At once: when save returns, the chief's file is complete.
    with strategy.scope():
        loaded = keras.saving.load_model(out / "model.keras")
    tf.nest.map_structure(np.testing.assert_array_equal, loaded.get_weights(), model.get_weights())
    resume = CALLBACKS.BackupAndRestore(out / "backup")
    rest = loaded.fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[resume]).history
    assert len(rest["loss"]) == 2
    tf.nest.map_structure(np.testing.assert_array_equal, *both(loaded.get_weights()))
    with pytest.raises(OSError, match="nowhere"):
        model.save(out / "nowhere" / "model.keras")
    model.export(out / "exported", verbose=False)
    both("written")
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    events = {name for name in files if "events" in name}
    assert sorted(pathlib.Path(name).parent.name for name in events) == ["train", "validation"]
    exported = {name for name in files if name.startswith("exported/")}
    checkpoints = {f"checkpoints/{epoch}.keras" for epoch in (1, 2, 3)}
    assert files - events - exported == checkpoints | {"best.weights.h5", "log.csv", "model.keras"}
    assert len((out / "log.csv").read_text().splitlines()) == 4


@pytest.mark.slow
def test_an_exported_lookup_table_loads_on_every_worker(strategy: Any, tmp_path: pathlib.Path) -> None:
    """The functions that restore the table would hold the chief's device."""
    words, path = np.array([["a"], ["b"], ["c"]]), tmp_path / "exported"
    with strategy.scope():
        lookup = keras.layers.StringLookup()
        lookup.adapt(words)
        inputs = keras.Input((1,), dtype="string")
        model = keras.Model(inputs, keras.layers.Flatten()(keras.layers.Embedding(4, 1)(lookup(inputs))))
    model.export(path, verbose=False)
    expected = model(tf.constant(words)).numpy()
    loaded = tf.saved_model.load(os.fspath(path))
    with strategy.scope():
        loaded_in_scope = tf.saved_model.load(os.fspath(path))
    for each in (loaded, loaded_in_scope):
        assert_close(each.serve(tf.constant(words)).numpy(), expected)
    assert b"/task:" not in (path / "saved_model.pb").read_bytes()


@pytest.mark.slow
def test_files_under_paths_of_workers_own_are_there_on_each(
    strategy: Any, both: Both, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a temporary directory that each worker has made."""
    own = tmp_path / f"disk-{index()}"
    own.mkdir()
    model = compiled(strategy)
    best = CALLBACKS.ModelCheckpoint(own / "{epoch}" / "{loss:.2f}.weights.h5", save_weights_only=True)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[best])
    assert [len(list((own / epoch).iterdir())) for epoch in ("1", "2")] == [1, 1]
    saves = {"m.keras": "save", "m.h5": "save", "m.weights.h5": "save_weights", "exported": "export"}
    for name, save in saves.items():
        getattr(model, save)(own / name, **({"verbose": False} if save == "export" else {}))
    assert ("each writes a file of its own" in capfd.readouterr().err) == (index() == 1)
    expected = model.predict(X, verbose=0)
    for name in ("m.keras", "m.h5"):
        with strategy.scope():
            # Keras does not know the loss "mse" of its legacy files.
            loaded = keras.models.load_model(own / name, compile=False)
        assert_close(loaded.predict(X, verbose=0), expected)
    model.set_weights([weight * 0 for weight in model.get_weights()])
    model.load_weights(own / "m.weights.h5")
    assert_close(model.predict(X, verbose=0), expected)
    exported = tf.saved_model.load(os.fspath(own / "exported"))
    assert_close(exported.serve(X).numpy(), expected)
    both("read")
    assert sorted(path.name for path in own.iterdir()) == sorted([*saves, "1", "2"])


@pytest.mark.slow
def test_a_backup_on_the_chiefs_own_disk_is_read_for_all(strategy: Any, both: Both, tmp_path: pathlib.Path) -> None:
    own = tmp_path / f"disk-{index()}"
    backup = CALLBACKS.BackupAndRestore(own, delete_checkpoint=False)
    compiled(strategy).fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[backup])
    again = compiled(strategy)
    rest = again.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[CALLBACKS.BackupAndRestore(own)]).history
    assert (len(rest["loss"]), int(again.optimizer.iterations)) == (1, 18)
    tf.nest.map_structure(np.testing.assert_array_equal, *both(again.get_weights()))
    assert list(own.glob("*")) == []
    assert not (tmp_path / "disk-1").exists()


@pytest.mark.slow
def test_checkpoint_managers_share_a_directory(strategy: Any, tmp_path: pathlib.Path) -> None:
    model = compiled(strategy)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(tmp_path), max_to_keep=2)
    for _ in range(4):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
        manager.checkpoint.restore(manager.save()).assert_existing_objects_matched()
    expected = model.get_weights()
    model.set_weights([weight * 0 for weight in expected])
    manager.restore_or_initialize()
    tf.nest.map_structure(np.testing.assert_array_equal, model.get_weights(), expected)


# What is shown, and what is refused.


def test_training_outside_of_the_scope_is_refused(strategy: Any) -> None:
    del strategy
    model = dense_model()
    model.compile("sgd", "mse")
    for name in ("fit", "train_on_batch"):
        message = rf"model\.{name} outside of strategy\.scope\(\): each of 2 workers would train a model of its own"
        with pytest.raises(RuntimeError, match=message) as raised:
            getattr(model, name)(X, Y)
        assert "\n" not in str(raised.value)
        assert str(raised.value).endswith(f"at training.py:{dense_model.__code__.co_firstlineno + 1}")
    # Each worker may use what is trained.
    assert model.predict(X, verbose=0).shape == Y.shape
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


@pytest.mark.slow
def test_the_chief_alone_shows_progress_unless_asked(strategy: Any) -> None:
    model = compiled(strategy)

    def is_shown(**verbose: Any) -> bool:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            model.fit(X, Y, epochs=2, **verbose)
            model.evaluate(X, Y, **verbose)
            model.predict(X, **verbose)
        return bool(shown.getvalue())

    # "auto" is Keras' default.
    assert [is_shown(**options) for options in ({}, {"verbose": 1})] == [index() == 0, True]


def test_a_rate_that_one_worker_sets_in_fit_is_refused_after_that_epoch(strategy: Any) -> None:
    class Halving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if index() == 1:
                self.model.optimizer.learning_rate = 0.05

    model = compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1))
    with pytest.raises(ValueError, match=r"models differ.*learning_rate of 0\.1 on worker:0, 0\.05 on worker:1"):
        model.fit(X, Y, batch_size=45, epochs=2, callbacks=Halving(), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 1


def own_step(model: keras.Model, optimizer: Any, reduce: Callable[[Any], Any] = lambda gradient: gradient) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.convert_to_tensor(X[:4])) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply([reduce(gradient) for gradient in gradients], model.trainable_variables)


def test_updates_outside_of_run_are_refused(strategy: Any) -> None:
    with strategy.scope():
        model, optimizer = dense_model(), OPTIMIZERS.SGD(0.1)
    before = model.get_weights()
    for made in (optimizer, OPTIMIZERS.SGD(0.1)):
        for train in (own_step, tf.function(own_step)):
            with pytest.raises(RuntimeError, match=r"drift apart\. Call it in the step: for batch in strategy\.exp"):
                train(model, made)
    with pytest.raises(RuntimeError, match="drift apart"):
        own_step(model, optimizer, lambda gradient: strategy.reduce("MEAN", gradient, axis=None))
    assert_close(before, model.get_weights())


def test_a_worker_may_train_a_model_of_its_own(strategy: Any) -> None:
    del strategy
    alone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    for train in (own_step, tf.function(own_step)):
        before = alone.get_weights()
        train(alone, OPTIMIZERS.SGD(0.1))
        assert not np.array_equal(before[0], alone.get_weights()[0])


# Who is slow.


# `test_step_times.py` has a slow input.
@pytest.mark.parametrize("kind", ["sum", *(pytest.param(each, marks=pytest.mark.slow) for each in ("step", "input"))])
def test_a_slow_input_step_or_sum_is_told_apart(strategy: Any, tmp_path: pathlib.Path, kind: str) -> None:
    slow_workers.check(strategy, tmp_path / "logs", index(), kind)
