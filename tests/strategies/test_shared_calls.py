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
from tfdist.compat.tensorflow import inputs
from tfdist.strategies import _shared_calls, _shared_datasets

EARLY = keras.callbacks.EarlyStopping()


class Fake:
    """Agreement of two workers; the traits of the second one are those of another call."""

    def __init__(self, other: calls.Call) -> None:
        self._other = other

    def gather(self, value: Any, what: str) -> dict[str, Any]:
        own, data = value
        other = self._other
        traits = own and [
            _shared_calls._traits(other),
            _shared_calls._callbacks(other),
            _shared_calls._values(_shared_calls._variables(other)),
        ]
        return {"worker:0": [own, data], "worker:1": [traits, data]}


def made(weights: float = 0.5, rate: float = 0.1, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(rate), "mse", **options)
    model.set_weights([np.full(weight.shape, weights) for weight in model.get_weights()])
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model | None = None, callbacks: Any = None, **arguments: Any) -> calls.Call:
    return calls.Call(model or made(), "fit", arguments, callbacks=callbacks)


def compare(one: calls.Call, other: calls.Call, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(calls, "current", lambda: one)
    return _shared_calls.gather_and_compare(Fake(other), 7, "comparing")


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
        pytest.param(lambda: fit(made(weights=0.25), epochs=2), "kernel of 2 on worker:0, 1 on worker:1", id="weights"),
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
    assert _shared_calls._value(table.value) == pytest.approx([np.linspace(0, 1_999_999, 4).sum()] * 2, rel=1e-3)
    assert _shared_calls._value(keras.Variable(np.zeros((0, 3))).value) == [0, 0]


@pytest.mark.parametrize("is_cancelling", [False, True])
def test_rounding_is_no_difference_and_other_weights_are(is_cancelling: bool):
    rng = np.random.default_rng(0)

    def differ(*weights: np.ndarray) -> bool:
        pairs = [_shared_calls._value(keras.Variable(each, dtype="float32").value) for each in weights]
        return _shared_calls._difference(pairs) is not None

    for _ in range(200):
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


class Worker:
    """Agreement of one of two workers, of which the first one has come to the exchange before."""

    tasks, count = ("worker:0", "worker:1"), 3

    def __init__(self, index: int, store: dict[str, Any]) -> None:
        self.task, self._store = self.tasks[index], store

    def gather(self, value: Any, what: str) -> dict[str, Any]:
        self._store[self.task] = value
        return {task: self._store.get(task, value) for task in self.tasks}

    def publish(self, key: str, value: str) -> None:
        self._store[key] = value

    def receive(self, key: str, timeout_secs: float) -> str | None:
        return self._store.get(key)


def compare_data(*datasets: tf.data.Dataset, is_for_predict: bool = False) -> set[_shared_datasets.Division]:
    store: dict[str, Any] = {}
    found = set()
    for index, dataset in enumerate(datasets):
        agreement: Any = Worker(index, store)
        found.add(_shared_datasets.compare(dataset, agreement, is_for_predict, is_apart=False))
    return found


def test_map_on_one_worker_alone_is_a_warning():
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((8, 2)), np.zeros(8))).batch(4)
    slow = rows.map(lambda x, y: tf.numpy_function(lambda *given: given, [x, y], [x.dtype, y.dtype]))
    slow = slow.map(lambda x, y: (tf.ensure_shape(x, [None, 2]), y))
    with pytest.warns(RuntimeWarning, match="functions of map differ between the workers"):
        compare_data(rows, slow)
    with pytest.raises(ValueError, match=r"^predict: .*order of the input.* other functions of map on worker:1"):
        compare_data(rows, slow, is_for_predict=True)
    with pytest.raises(ValueError, match=r"same structure, dtypes and shapes; .* worker:1: .*float32"):
        compare_data(rows, rows.map(lambda x, y: (tf.cast(x, tf.float32), y)))


@pytest.mark.parametrize("is_for_predict", [False, True])
def test_filters_that_differ_between_workers_are_refused(is_for_predict: bool):
    def share(rank: int) -> tf.data.Dataset:
        numbered = tf.data.Dataset.range(20).batch(4).unbatch().enumerate()
        return numbered.filter(lambda index, number: index % 2 == rank).map(lambda index, number: number).batch(4)

    compare_data(share(0), share(0), is_for_predict=is_for_predict)
    with pytest.raises(
        ValueError, match=r"^dataset: the functions of filter differ .*AutoShardPolicy.OFF.* on worker:1"
    ):
        compare_data(share(0), share(1), is_for_predict=is_for_predict)


def test_generators_that_differ_between_workers_are_said(capfd: pytest.CaptureFixture[str]):
    inputs.note_generators()

    def generated(first: int) -> tf.data.Dataset:
        numbers = range(first, first + 20)
        return tf.data.Dataset.from_generator(lambda: numbers, output_signature=tf.TensorSpec([], tf.int64)).batch(4)

    for second, is_said in ((0, False), (1, True)):
        datasets = generated(0), generated(second)
        compare_data(*datasets)
        for dataset in datasets:
            assert len(list(dataset)) == 5
        text = capfd.readouterr().err
        assert ("generators, or PyDatasets, of worker:1 and worker:0 return different examples" in text) is is_said


def test_job_of_the_data_service_hands_out_whole_batches():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()

    def prepared(job_name: str | None) -> tf.data.Dataset:
        distribute = service.distribute(service.ShardingPolicy.OFF, dispatcher.target, job_name=job_name)
        return tf.data.Dataset.range(8).batch(4).apply(distribute).map(lambda batch: batch + 1)

    assert compare_data(prepared("train"), prepared("train")) == {_shared_datasets.Division.HANDED_OUT}
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
