# SPDX-License-Identifier: Apache-2.0
"""Buckets: nothing is lost, nothing changes its place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist.transport import buckets


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
