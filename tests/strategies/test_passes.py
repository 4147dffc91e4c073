# SPDX-License-Identifier: Apache-2.0
"""A pass over data reads its own batches, waits for no tuning, and a gather traces nothing."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import cross_device_ops

import tfdist

pytestmark = pytest.mark.devices

X = np.arange(44, dtype=np.float32)[:, None]


def _counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls, original = [], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_two_passes_at_a_time_read_their_own_batches(cpus: list[str]) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2])
    batches = tf.data.Dataset.from_tensor_slices((X, {"ragged": tf.ragged.range(tf.range(44))})).batch(10)
    data = strategy.experimental_distribute_dataset(batches)
    first, second = iter(data), iter(data)
    next(first)
    for iterator, expected in ((first, X[10:]), (second, X)):
        parts = [strategy.experimental_local_results(batch[0]) for batch in iterator]
        np.testing.assert_array_equal(np.concatenate([part for each in parts for part in each]), expected)


def test_gather_outside_of_a_graph_traces_nothing(cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(11))
    traced = _counting(monkeypatch, cross_device_ops.def_function, "function")
    batches = [strategy.run(lambda x: 2 * x, args=(batch,)) for batch in data]
    made = len(traced)
    gathered = [strategy.gather(batch, axis=0) for batch in batches]
    np.testing.assert_array_equal(np.concatenate(gathered), 2 * X)
    assert len(traced) == made
    in_graph = tf.function(lambda batch: strategy.gather(batch, axis=0))
    np.testing.assert_array_equal(in_graph(batches[0]), 2 * X[:11])


ARRAYS = np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects for each data set that was iterated over: True for autotuning, False for none, None if not decided."""
    seen = []
    plain = dataset_ops.DatasetV2._apply_debug_options

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        seen.append(dataset.options().autotune.enabled)
        return plain(dataset)

    monkeypatch.setattr(dataset_ops.DatasetV2, "_apply_debug_options", apply)
    return seen


def fitted(strategy: tf.distribute.Strategy, *data: Any, **options: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(*data, verbose=0, **options)


def test_pipelines_that_keras_makes_of_arrays_are_not_tuned(cpus: list[str], tuned: list[Any]):
    # Those of the devices included.
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(0)])
    fitted(strategy, *ARRAYS, batch_size=4, validation_split=0.5)
    assert set(tuned) == {False}


def test_pipelines_of_users_are_tuned_as_they_say(cpus: list[str], tuned: list[Any]):
    fitted(tfdist.MirroredStrategy(cpus[:2]), tf.data.Dataset.from_tensor_slices(ARRAYS).batch(4))
    # The pipelines of the two devices hand on what the user's makes.
    assert None in tuned and tuned.count(False) == 2 * tuned.count(None)
