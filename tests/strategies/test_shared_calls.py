# SPDX-License-Identifier: Apache-2.0
"""Workers compare their calls, callbacks, models, weights and data before they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.keras import calls
from tfdist.strategies import _shared_calls, _shared_datasets

EARLY = keras.callbacks.EarlyStopping()


class Worker:
    """Agreement of one of two workers, of which the first one has come to the exchange before."""

    tasks, count = ("worker:0", "worker:1"), 3

    def __init__(self, index: int, store: dict[str, Any]) -> None:
        self.task, self._store = self.tasks[index], store

    def gather(self, value: Any, what: str) -> dict[str, Any]:
        self._store[self.task] = value
        return {task: self._store.get(task, value) for task in self.tasks}

    def publish(self, key: str, value: str) -> bool:
        return self._store.setdefault(key, value) is value

    def receive(self, key: str, timeout_secs: float) -> str | None:
        return self._store.get(key)


def made(weights: float = 0.5, rate: float = 0.1, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(rate), "mse", **options)
    model.set_weights([np.full(weight.shape, weights) for weight in model.get_weights()])
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model | None = None, callbacks: Any = None, **arguments: Any) -> calls.Call:
    return calls.Call(model or made(), "fit", arguments, callbacks=callbacks)


def compare(one: calls.Call, other: calls.Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compares the calls of two workers, one after the other; returns what the second one has gathered."""
    store: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for index, call in enumerate((one, other)):
        monkeypatch.setattr(calls, "current", lambda call=call: call)
        found = _shared_calls.gather_and_compare(Worker(index, store), 7, "comparing")  # pyright: ignore
    return found


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param(lambda: fit(epochs=3), "epochs 2 on worker:0, epochs 3 on worker:1", id="argument"),
        pytest.param(
            lambda: fit(epochs=2, validation_data=(1, 2)), "validation_data none on worker:0", id="validation"
        ),
        pytest.param(
            lambda: fit(made(metrics=["mae"]), epochs=2), "metrics none on worker:0, metrics mae", id="metrics"
        ),
        pytest.param(lambda: fit(epochs=2, callbacks=[EARLY]), "EarlyStopping on worker:1", id="callback"),
        pytest.param(
            lambda: fit(made(weights=0.25), epochs=2), "kernel of 0.5 on worker:0, 0.25 on worker:1", id="weights"
        ),
        pytest.param(lambda: fit(made(rate=0.2), epochs=2), "learning_rate of 0.1 on worker:0, 0.2", id="rate"),
    ],
)
def test_call_that_differs_between_workers_is_refused(
    other: Callable[[], calls.Call], words: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"^model\.fit: .*every worker.* Received: ") as raised:
        compare(fit(epochs=2), other(), monkeypatch)
    assert words in str(raised.value)


def test_call_that_is_the_same_is_compared_once(monkeypatch: pytest.MonkeyPatch):
    # What the chief alone may have, and weights that rounding has moved.
    one, other = fit(callbacks=[keras.callbacks.CSVLogger("x")], epochs=2, verbose=1), fit(made(0.5001), epochs=2)
    assert compare(one, other, monkeypatch) == {"worker:0": 7, "worker:1": 7}
    other.arguments["epochs"] = 3
    assert one.is_compared and compare(one, other, monkeypatch)


def test_value_of_a_variable_is_of_few_numbers():
    table = keras.Variable(np.arange(2_000_000.0).reshape(-1, 2), dtype="float32")
    assert _shared_calls._value(table.value) == pytest.approx([0, 666667, 1333332, 1999999], rel=1e-5)
    reads = [tf.raw_ops.ReadVariableOp(resource=table.value.handle, dtype=tf.float32) for _ in range(2)]
    assert np.shares_memory(*map(np.frombuffer, reads))
    assert _shared_calls._value(keras.Variable(np.zeros((0, 3))).value) == []
    assert _shared_calls._value(keras.Variable(3.0).value) == [3.0]


@pytest.mark.parametrize("is_cancelling", [False, True])
def test_rounding_is_no_difference_and_other_weights_are(is_cancelling: bool):
    rng = np.random.default_rng(0)

    def differ(*weights: np.ndarray) -> bool:
        pairs = [_shared_calls._value(keras.Variable(each, dtype="float32").value) for each in weights]
        return _shared_calls._difference(pairs) is not None

    for _ in range(40):
        weights = rng.normal(size=4) * 10.0 ** rng.integers(-6, 6)
        other = rng.normal(size=4) * np.abs(weights).max()
        if is_cancelling:
            weights[-1] = -weights[:-1].sum()
            other = weights * 1.05
        assert not differ(weights, weights * (1 + rng.uniform(-1e-5, 1e-5, 4)))
        assert differ(weights, other)


def test_numbers_that_are_not_finite_differ_from_finite_ones_only():
    nan, inf = float("nan"), float("inf")
    assert _shared_calls._difference([[nan, nan], [nan, inf]]) is None
    assert _shared_calls._difference([[1.0, 1.0], [nan, inf]])
    assert _shared_calls._difference([[0.0, 0.0], [0.0, 0.0]]) is None
    assert _shared_calls._difference([[0.0], [0.0, 0.0]])


def compare_data(*datasets: tf.data.Dataset, is_for_predict: bool = False) -> set[_shared_datasets.Division]:
    """Divides the data sets of two workers, and reads those that both have, one after the other."""
    store: dict[str, Any] = {}
    found, agreements = set(), [Worker(index, store) for index in range(len(datasets))]
    for dataset, agreement in zip(datasets, agreements, strict=True):
        found.add(_shared_datasets.compare(dataset, agreement, is_for_predict, is_apart=False))  # pyright: ignore
    for dataset, agreement in (
        zip(datasets, agreements, strict=True) if found == {_shared_datasets.Division.DEALT} else ()
    ):
        same = _shared_datasets.SameBatches(agreement)  # pyright: ignore[reportArgumentType]
        same.watching(dataset, is_for_predict)().reduce(0, lambda count, *_: count + 1)
    return found


def test_structures_and_lengths_that_differ_are_refused():
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((8, 2)), np.zeros(8))).batch(4)
    # Python that leaves the examples as they are may be on one worker alone.
    slow = rows.map(lambda x, y: tf.numpy_function(lambda *given: given, [x, y], [x.dtype, y.dtype]))
    compare_data(rows, slow.map(lambda x, y: (tf.ensure_shape(x, [None, 2]), y)))
    with pytest.raises(
        ValueError, match=r"the same data set.* elements \('float64', 'float64'\) on worker:0, elements \('float32'"
    ):
        compare_data(rows, rows.map(lambda x, y: (tf.cast(x, tf.float32), y)))
    with pytest.raises(ValueError, match=r"remove x\[rank::n\].* Received: batches 2 on worker:0, batches 1 on worker"):
        compare_data(rows, rows.shard(2, 0))
    with pytest.raises(ValueError, match=r"the same data set.* Received: batches 2 on worker:0, batches endless"):
        compare_data(rows, rows.repeat())


NUMBERS = np.random.default_rng(1).normal(size=(48, 3)).astype(np.float32)
LABELS, ONES = np.arange(48), np.ones(48)


def of_arrays(*arrays: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])


def every_second(rank: int) -> tf.data.Dataset:
    numbered = of_arrays(NUMBERS).enumerate().filter(lambda index, row: index % 2 == rank)
    return numbered.map(lambda index, row: row)


def shuffled(seed: int) -> tf.data.Dataset:
    # One data set is read by two workers here.
    return of_arrays(LABELS).shuffle(48, seed=seed, reshuffle_each_iteration=False)


def late(first: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(100).map(lambda number: number if number < 97 else number + first)


def generated(*arrays: np.ndarray) -> tf.data.Dataset:
    def rows() -> Any:
        yield from (tuple(row) if len(row) > 1 else row[0] for row in zip(*arrays, strict=True))

    return tf.data.Dataset.from_generator(rows, output_signature=of_arrays(*arrays).element_spec)


def drawn(array: np.ndarray, seed: int) -> tf.data.Dataset:
    draw = lambda x, y: (x + tf.random.uniform([3], seed=seed), y)  # noqa: E731
    return of_arrays(array, LABELS).map(draw)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(of_arrays(NUMBERS[::2], LABELS[::2]), of_arrays(NUMBERS[1::2], LABELS[1::2]), id="share"),
        pytest.param(of_arrays(NUMBERS[::2], ONES[::2]), of_arrays(NUMBERS[1::2], ONES[::2]), id="one label"),
        pytest.param(of_arrays(NUMBERS).shard(2, 0), of_arrays(NUMBERS).shard(2, 1), id="shard"),
        pytest.param(shuffled(1), shuffled(2), id="order"),
        pytest.param(every_second(0), every_second(1), id="filter"),
        pytest.param(late(0), late(5), id="late"),
        pytest.param(of_arrays(LABELS + 10**9), of_arrays(LABELS + 1 + 10**9), id="large integers"),
        pytest.param(of_arrays(np.array(["a", "b"])), of_arrays(np.array(["a", "c"])), id="words"),
    ],
)
@pytest.mark.parametrize("is_for_predict", [False, True])
def test_different_examples_are_refused(one: tf.data.Dataset, other: tf.data.Dataset, is_for_predict: bool):
    compare_data(one.batch(8), one.batch(8), is_for_predict=is_for_predict)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        compare_data(one.batch(8), other.batch(8), is_for_predict=is_for_predict)
    found = str(_shared_datasets.explain(raised.value))
    assert found.startswith("dataset: every worker must be given the same data set") and "x[rank::n]" in found
    assert found.splitlines()[0].endswith(" on worker:1 than on worker:0") and len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("one", "other", "is_said"),
    [
        pytest.param(of_arrays(NUMBERS, LABELS), of_arrays(NUMBERS * (1 + 1e-7), LABELS), False, id="rounding"),
        pytest.param(of_arrays(NUMBERS, LABELS), of_arrays(NUMBERS * 1.1, LABELS), True, id="another map"),
        pytest.param(generated(NUMBERS), generated(NUMBERS), False, id="same generators"),
        pytest.param(generated(NUMBERS), generated(NUMBERS + 1), True, id="other generators"),
        pytest.param(generated(NUMBERS, ONES), generated(NUMBERS + 1, ONES), True, id="generators of one label"),
        pytest.param(drawn(NUMBERS, 1), drawn(NUMBERS, 2), False, id="drawn"),
        pytest.param(of_arrays(np.array(["/a/x"])), of_arrays(np.array(["/b/x"])), False, id="directories"),
    ],
)
def test_examples_that_may_differ_are_at_most_said(
    one: tf.data.Dataset, other: tf.data.Dataset, is_said: bool, capfd: pytest.CaptureFixture[str]
):
    compare_data(one.batch(8), other.batch(8))
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "another batch 0 on worker:1 than on worker:0" in line] == lines[: int(is_said)]
    assert bool(lines) is is_said


def test_predictions_of_different_generators_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="every worker must be given the same data set"):
        compare_data(generated(NUMBERS).batch(8), generated(NUMBERS + 1).batch(8), is_for_predict=True)


def test_a_late_worker_of_a_quorum_is_compared_in_a_line(capfd: pytest.CaptureFixture[str]):
    store: dict[str, Any] = {}
    for index, dataset in enumerate((of_arrays(LABELS), of_arrays(LABELS + 1))):
        same = _shared_datasets.SameBatches(Worker(index, store))  # pyright: ignore[reportArgumentType]
        assert len(list(same.watching(dataset.batch(8), is_for_predict=False, has_quorum=True)())) == 6
    assert capfd.readouterr().err.count("another batch 0 on worker:1 than on worker:0") == 1


@pytest.mark.parametrize(
    "policy", [tf.data.experimental.AutoShardPolicy.AUTO, tf.data.experimental.AutoShardPolicy.FILE]
)
def test_data_that_are_not_watched_are_compared_by_what_makes_them(policy: Any, capfd: pytest.CaptureFixture[str]):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    is_file = policy == tf.data.experimental.AutoShardPolicy.FILE
    for other, count in ((NUMBERS, 0), (NUMBERS + 1, 1)):
        store: dict[str, Any] = {}
        for index, numbers in enumerate((NUMBERS, other)):
            dataset = of_arrays(numbers).with_options(options)
            agreement: Any = Worker(index, store)
            _shared_datasets.compare(dataset, agreement, False, is_apart=False, is_watched=is_file)
        assert capfd.readouterr().err.count("other operations, arrays or paths") == count


def test_watched_batches_keep_specs_and_length():
    ragged = tf.data.Dataset.from_tensor_slices({"x": tf.ragged.constant([[1], [2, 3], [4]]), "y": [True, False, True]})
    for dataset in (ragged.batch(2), ragged.batch(2, drop_remainder=True), of_arrays(NUMBERS, LABELS).batch(8)):
        same = _shared_datasets.SameBatches(Worker(0, {}))  # pyright: ignore[reportArgumentType]
        watched = same.watching(dataset, is_for_predict=False)()
        assert watched.element_spec == dataset.element_spec and len(watched) == len(dataset)
        assert str(list(watched)) == str(list(dataset))


def test_job_of_the_data_service_hands_out_whole_batches():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()

    def prepared(job_name: str | None) -> tf.data.Dataset:
        distribute = service.distribute(service.ShardingPolicy.OFF, dispatcher.target, job_name=job_name)
        return tf.data.Dataset.range(8).batch(4).apply(distribute).map(lambda batch: batch + 1)

    assert compare_data(prepared("train"), prepared("train")) == {_shared_datasets.Division.OWN}
    with pytest.raises(ValueError, match=r"^dataset: without a job_name .* give all workers the same job_name"):
        compare_data(prepared(None), prepared(None))
    with pytest.raises(ValueError, match=r"job_name='other' of the tf\.data service"):
        compare_data(prepared("train"), prepared("other"))
    with pytest.raises(ValueError, match=r"^predict: .* Received: job_name='train'"):
        compare_data(prepared("train"), prepared("train"), is_for_predict=True)


@pytest.mark.parametrize("method", ["cache", "snapshot"])
def test_one_file_of_all_workers_is_refused(method: str):
    def writing(path: str) -> tf.data.Dataset:
        return getattr(tf.data.Dataset.range(8), method)(path).batch(4)

    with pytest.raises(ValueError, match=r"dataset.save\(path\) .* Received: both on worker:0 and worker:1"):
        compare_data(writing("both"), writing("both"))
    in_memory = tf.data.Dataset.range(8).cache().batch(4)
    assert compare_data(in_memory, in_memory) == {_shared_datasets.Division.DEALT}
