# SPDX-License-Identifier: Apache-2.0
"""A pass over data reads its own batches, and a gather traces nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
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
