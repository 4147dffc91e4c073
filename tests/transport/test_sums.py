# SPDX-License-Identifier: Apache-2.0
"""Sums in buckets lose nothing; of sums by a function in Python nothing is left in the next step."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist.transport import buckets
from tfdist.transport.sums import Traffic, WorkerSums

pytestmark = pytest.mark.devices


class Doubling:
    """Sums over two workers that have the same; it notes how often it may work in place."""

    def __init__(self) -> None:
        self.in_place: list[bool] = []

    def __call__(self, array: np.ndarray, in_place: bool) -> np.ndarray:
        self.in_place.append(in_place)
        total = array if in_place else array.copy()
        total *= 2
        return total


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerSums, Doubling]:
    monkeypatch.setattr("tfdist.compat.tensorflow.replicas.worker_device", lambda strategy: "/device:CPU:0")
    found, double = WorkerSums(None), Doubling()
    found.use(double, _gather, lambda what: contextlib.nullcontext(), lambda: None)
    return found, double


def _gather(message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As if the other worker had sent a byte more, all 9."""
    other = np.full(len(message) + 1, 9, np.uint8)
    return np.stack([np.append(message, np.uint8(0)), other]), np.array([len(message), len(other)])


def test_messages_are_counted_at_their_lengths(sums: tuple[WorkerSums, Doubling], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tfdist.compat.tensorflow.replicas.worker_count", lambda strategy: 2)
    sums[0].traffic = Traffic(2)
    step = tf.function(lambda message: (sums[0].gather(message, in_step=True), sums[0].in_step([tf.ones([5])])))
    for call in (step, step.python_function):
        gathered, _ = call(tf.constant([1, 2, 3], tf.uint8))
        np.testing.assert_array_equal(gathered, [[1, 2, 3, 0], [9, 9, 9, 9]])
    # And the sum of 20 bytes in each step.
    assert sums[0].traffic.by_worker() == [2 * (3 + 20), 2 * (4 + 20)]


def test_constants_that_are_put_together_are_summed_anew_in_each_step(sums: tuple[WorkerSums, Doubling]):
    """TensorFlow would make one constant of them, and a sum in place would change it."""

    @tf.function
    def step() -> list[tf.Tensor]:
        return sums[0].in_step([tf.constant([0.1, 0.2]), tf.fill([3], 0.5), tf.constant(7, tf.int64)])

    for _ in range(4):
        one, other, number = step()
        np.testing.assert_allclose(one, [0.2, 0.4])
        np.testing.assert_allclose(other, [1.0, 1.0, 1.0])
        assert int(number) == 14
    assert all(sums[1].in_place)


def test_tensors_that_are_put_together_keep_a_known_size(monkeypatch: pytest.MonkeyPatch):
    """TensorFlow's collectives sum a tensor of unknown size with a key for each execution, around a ring."""
    shapes = []
    monkeypatch.setattr(
        "tfdist.compat.tensorflow.collectives.sum_in_step", lambda strategy, flat: shapes.append(flat.shape) or flat
    )

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(unknown: tf.Tensor) -> list[tf.Tensor]:
        known = WorkerSums(None).in_step([tf.ones([2, 3]), tf.ones([5])])
        return known + WorkerSums(None).in_step([tf.ones([2, 3]), unknown])

    assert [one.shape.as_list() for one in step(tf.ones([4]))] == [[2, 3], [5], [2, 3], [4]]
    assert [shape.as_list() for shape in shapes] == [[11], [None]]


def test_sums_in_place_change_no_tensor_that_is_used_elsewhere(sums: tuple[WorkerSums, Doubling]):
    variable, large = tf.Variable(tf.ones([2048])), tf.constant(np.ones(2048, np.float32))
    column, row = tf.ones([64, 1]), tf.ones([1, 64])

    @tf.function
    def step() -> list[tf.Tensor]:
        # TensorFlow makes one product of two that are equal.
        product, equal = tf.matmul(column, row), tf.matmul(column, row)
        given = [product, equal, variable, large, tf.ones([2048])]
        totals = [sums[0].in_step([each])[0] for each in given]
        with tf.control_dependencies(totals):
            return [*totals, tf.identity(product) + 0.0]

    for _ in range(3):
        *totals, product = step()
        for total in totals:
            np.testing.assert_array_equal(total, np.full(total.shape, 2.0))
        for other in (product, variable, large):
            np.testing.assert_array_equal(other, np.ones(other.shape))
    assert all(sums[1].in_place)


@given(st.lists(st.integers(0, 3 * buckets.BUCKET_BYTES), max_size=12))
def test_a_bucket_is_full_or_has_one_large_item(sizes: list[int]):
    grouped = buckets.grouped(list(enumerate(sizes)), sizes)
    assert [item for bucket in grouped for item in bucket] == list(enumerate(sizes))
    for bucket in grouped:
        assert len(bucket) == 1 or sum(size for _, size in bucket) <= buckets.BUCKET_BYTES
    for one, following in itertools.pairwise(grouped):
        assert sum(size for _, size in one) + following[0][1] > buckets.BUCKET_BYTES


@pytest.mark.devices
@pytest.mark.parametrize("in_graph", [False, True])
def test_each_tensor_is_summed_in_its_dtype_and_shape(in_graph: bool):
    calls: list[tuple[str, int]] = []

    def sum_of(flat: tf.Tensor) -> tf.Tensor:
        calls.append((flat.dtype.name, flat.shape.rank))
        return 2 * flat

    def double(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return buckets.sum_in_buckets(tensors, lambda bucket: buckets.sum_together(bucket, sum_of))

    given_ones = [tf.reshape(tf.range(6.0), [2, 3]), tf.constant(3, tf.int64), tf.constant([1.0]), tf.zeros([0])]
    found = (tf.function(double) if in_graph else double)(*given_ones)
    for one, before in zip(found, given_ones, strict=True):
        np.testing.assert_array_equal(one, 2 * before.numpy())
        assert one.dtype == before.dtype and one.shape == before.shape
    assert calls == [("float32", 1), ("int64", 1)]
