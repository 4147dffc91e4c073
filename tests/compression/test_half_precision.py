# SPDX-License-Identifier: Apache-2.0
"""Half precision: bytes, rounding and overflow."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import HalfPrecision, LocalTransport

pytestmark = pytest.mark.devices


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bytes_are_halved_exactly(dtype: str):
    tensors = [tf.ones([3, 7]), tf.ones([]), tf.ones([100])]
    message, state = HalfPrecision(dtype).encode(tensors, {})
    assert message.dtype == dtype and state == {}
    assert 2 * message.numpy().nbytes == sum(tensor.numpy().nbytes for tensor in tensors)


def test_values_are_rounded_to_the_nearest():
    values = tf.constant([1.0, 1.0 + 2**-12, -0.1, 6e-8])
    (total,), _ = HalfPrecision("float16").exchange([values], {}, LocalTransport())
    np.testing.assert_array_equal(total, values.numpy().astype(np.float16).astype(np.float32))


def test_overflow_is_infinite_in_float16_only():
    values = [tf.constant([1e5, 1.0])]
    assert np.isinf(HalfPrecision("float16").exchange(values, {}, LocalTransport())[0][0][0])
    assert np.isfinite(HalfPrecision("bfloat16").exchange(values, {}, LocalTransport())[0][0]).all()
