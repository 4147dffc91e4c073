# SPDX-License-Identifier: Apache-2.0
"""Bundles give back the tensors that were packed, and few tensors are sent."""

from __future__ import annotations

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.engines.transfer.plan import TransferPlan
from tfdist.transport.bundles import _SMALL, Bundles

CPU = "/device:CPU:0"
SHAPES = st.lists(
    st.tuples(st.sampled_from([(), (0,), (3,), (2, 4)]), st.sampled_from(["float32", "int64"])), max_size=8
)


@hypothesis.given(SHAPES)
@hypothesis.settings(deadline=None)
def test_comes_out_as_it_went_in(specs: list[tuple[tuple[int, ...], str]]) -> None:
    tensors = [tf.constant(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype) for shape, dtype in specs]
    bundles = Bundles(tensors, [CPU] * len(tensors))
    packed = bundles.pack(tensors)
    assert len(packed) == len({dtype for _, dtype in specs}) and bundles.are_small
    for before, after in zip(tensors, bundles.unpack(packed), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_large_unknown_and_scattered_tensors_travel_alone() -> None:
    specs = [
        tf.TensorSpec([_SMALL + 1], tf.float32),
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([2], tf.float32),
        tf.TensorSpec([2], tf.float32),
        tf.TensorSpec([2], tf.float32),
    ]
    bundles = Bundles(specs, ["a", "a", "a", "b", "a"])
    assert bundles.devices == ["a", "a", "a", "b"] and not bundles.are_small
    packed = bundles.pack([tf.zeros([_SMALL + 1]), tf.ones([5]), tf.ones([2]), tf.zeros([2]), tf.fill([2], 7.0)])
    assert [tensor.shape[0] for tensor in packed] == [_SMALL + 1, 5, 4, 2]


def test_a_plan_bundles_small_tensors_unless_it_is_plain() -> None:
    specs = [tf.TensorSpec([2]), tf.TensorSpec([3])]
    assert [len(TransferPlan(mode).bundles(specs, ["a", "a"]).devices) for mode in ("auto", "plain")] == [1, 2]
