# SPDX-License-Identifier: Apache-2.0
"""PowerSGD against its algorithm in NumPy, and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
import simulated
import tensorflow as tf

from tfdist.compression import LocalTransport, PowerSGD

pytestmark = pytest.mark.devices
SHAPE = (24, 40)


def test_workers_follow_the_algorithm_in_numpy():
    """Algorithms 1 and 2 of arXiv 1905.13727, with sums in place of means."""
    rng = np.random.default_rng(0)
    codec = PowerSGD(3)
    states = [codec.init([tf.TensorSpec(SHAPE)])] * 2
    q = states[0]["query/0"].numpy().astype(np.float64)
    errors = [np.zeros(SHAPE)] * 2
    for _ in range(4):
        gradients = [rng.standard_normal(SHAPE) for _ in range(2)]
        matrices = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        p = np.linalg.qr(sum(m @ q for m in matrices)).Q
        own = [m.T @ p for m in matrices]
        q = sum(own) / 2
        errors = [m - p @ each.T for m, each in zip(matrices, own, strict=True)]
        tensors = [[tf.constant(gradient, tf.float32)] for gradient in gradients]
        sums, states, _ = simulated.exchange(codec, tensors, states)
        np.testing.assert_allclose(sums[0][0], p @ sum(own).T, atol=1e-4)
        for state, error in zip(states, errors, strict=True):
            np.testing.assert_allclose(state["residual/0"], error, atol=1e-4)
            # Signs and directions of columns may differ; the space that they span does not.
            np.testing.assert_allclose(state["query/0"] @ tf.transpose(state["query/0"]), q @ q.T, atol=1e-2)
        np.testing.assert_array_equal(states[0]["query/0"], states[1]["query/0"])


def test_queries_are_equal_on_all_workers_and_differ_by_tensor():
    specs = [tf.TensorSpec(SHAPE), tf.TensorSpec(SHAPE)]
    one, other = PowerSGD(2).init(specs), PowerSGD(2).init(specs)
    np.testing.assert_array_equal(one["query/0"], other["query/0"])
    assert np.abs(one["query/0"] - one["query/1"]).min() > 0


def test_zero_gradients_do_not_end_the_iteration():
    """A query that became zero would send nothing ever after."""
    codec, rng = PowerSGD(2), np.random.default_rng(2)
    state = codec.init([tf.TensorSpec(SHAPE)])
    for _ in range(2):
        _, state = codec.exchange([tf.zeros(SHAPE)], state, LocalTransport())
    gradient = tf.constant(rng.standard_normal((24, 1)) @ rng.standard_normal((1, 40)), tf.float32)
    sent = 0.0
    for _ in range(3):
        (total,), state = codec.exchange([gradient], state, LocalTransport())
        sent += total.numpy()
    np.testing.assert_allclose(sent, 3 * gradient, rtol=1e-3, atol=1e-3)


def test_bytes_are_those_of_both_factors_and_of_small_tensors():
    codec = PowerSGD(2)
    tensors = [tf.ones(SHAPE), tf.ones([3, 3, 16, 32]), tf.ones([40]), tf.ones([]), tf.ones([4, 4]), tf.ones([9, 0])]
    state = codec.init([tf.TensorSpec(tensor.shape) for tensor in tensors])
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "residual/0": SHAPE,
        "residual/1": (3, 3, 16, 32),
        "query/0": (40, 2),
        "query/1": (32, 2),
    }
    _, _, sent = simulated.exchange(codec, [tensors], [state])
    assert sent == 4 * (2 * (24 + 40) + 2 * (144 + 32) + 40 + 1 + 16)


def test_four_bits_round_values_to_15_levels_of_their_column():
    codec, rng = PowerSGD(2, bits=4), np.random.default_rng(3)
    tensors = [tf.constant(rng.standard_normal(shape), tf.float32) for shape in (SHAPE, (9,))]
    sums, states, sent = simulated.exchange(codec, [tensors], [codec.init([tf.TensorSpec(t.shape) for t in tensors])])
    assert sent == 4 * (2 + 2 + 1) + (2 * (24 + 40) + 9 + 1) // 2
    step = 0.335 * np.sqrt(np.mean(np.square(tensors[1])))
    rounded = np.clip(np.round(tensors[1] / step), -7, 7) * step
    np.testing.assert_allclose(sums[0][1], rounded, atol=1e-6)
    np.testing.assert_allclose(states[0]["residual/1"], tensors[1] - rounded, atol=1e-6)


def test_encode_and_decode_refer_to_exchange():
    with pytest.raises(TypeError, match=r"PowerSGD\(rank=2\) needs more than one message; call exchange"):
        PowerSGD(2).encode([], {})
    with pytest.raises(TypeError, match=r"PowerSGD\(rank=2\) needs more than one message; call exchange"):
        PowerSGD(2).decode(tf.zeros([1]), [])
