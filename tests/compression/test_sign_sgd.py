# SPDX-License-Identifier: Apache-2.0
"""SignSGD with error feedback: its formula and its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import LocalTransport, SignSGD, frames

pytestmark = pytest.mark.devices


def test_steps_follow_the_published_formula():
    rng = np.random.default_rng(0)
    codec, spec, error = SignSGD(), tf.TensorSpec([70_003], tf.float32), np.zeros(70_003, np.float32)
    state = codec.init([spec])
    for _ in range(4):
        gradient = rng.standard_normal(70_003).astype(np.float32)
        p = gradient + error
        delta = np.abs(p).mean(dtype=np.float64).astype(np.float32) * np.sign(p)
        error = p - delta
        (total,), state = codec.exchange([tf.constant(gradient)], state, LocalTransport())
        np.testing.assert_allclose(total, delta, rtol=1e-6)
        np.testing.assert_allclose(state["residual/0"], error, rtol=1e-4, atol=1e-5)


def test_messages_take_one_bit_per_value_and_a_scale_per_tensor():
    tensors = [tf.ones([1000, 8]), tf.ones([3]), tf.ones([]), tf.ones([0])]
    codec = SignSGD()
    message, _ = codec.encode(tensors, codec.init([tf.TensorSpec(tensor.shape) for tensor in tensors]))
    assert message.shape[0] == frames.HEADER_BYTES + 4 * 4 + 1000 + 1 + 1


def test_zeros_are_sent_as_positive_values():
    tensors = [tf.constant([0.0, -3.0])]
    (total,), state = SignSGD().exchange(tensors, SignSGD().init([tf.TensorSpec([2])]), LocalTransport())
    np.testing.assert_array_equal(total, [1.5, -1.5])
    np.testing.assert_array_equal(state["residual/0"], [-1.5, -1.5])
