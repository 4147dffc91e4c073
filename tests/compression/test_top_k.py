# SPDX-License-Identifier: Apache-2.0
"""TopK: Deep Gradient Compression's algorithm, transcribed; its warmup, its ties and its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from entropy import entropy_bits

from tfdist.compression import TopK, frames

pytestmark = pytest.mark.devices


def specs_of(arrays: list[np.ndarray]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(array.shape, tf.float32) for array in arrays]


def step(codec: TopK, arrays: list[np.ndarray], state: dict[str, tf.Tensor]):
    """Sums, new state and message of one worker."""
    message, state = codec.encode([tf.constant(array, tf.float32) for array in arrays], state)
    sums = codec.decode(message[None], specs_of(arrays), ["worker:0"])
    return [total.numpy() for total in sums], state, message.numpy()


def published(gradients: list[list[np.ndarray]], density: float, momentum: float) -> list[list[np.ndarray]]:
    """Lines 8 to 16 of algorithm 4 of arXiv 1712.01887 for one node: U, V, threshold, mask, and both masked."""
    u = [np.zeros_like(gradient) for gradient in gradients[0]]
    v = [np.zeros_like(gradient) for gradient in gradients[0]]
    steps = []
    for gradient in gradients:
        sent = []
        for j, g in enumerate(gradient):
            u[j] = np.float32(momentum) * u[j] + g
            v[j] = v[j] + u[j]
            # "s % of |V[j]|": the largest magnitude that is not sent.
            number = max(1, round(density * g.size))
            ranked = np.sort(np.abs(v[j]), axis=None)
            threshold = ranked[-number - 1] if number < g.size else 0
            mask = np.abs(v[j]) > threshold
            sent.append(v[j] * mask)
            v[j] = v[j] * ~mask
            u[j] = u[j] * ~mask
        steps.append(sent)
    return steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
def test_steps_follow_the_published_algorithm(momentum: float, density: float):
    rng = np.random.default_rng(0)
    shapes = ((40_001,), (30, 7), ())
    gradients = [[rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(6)]
    codec = TopK(density, momentum=momentum)
    state = codec.init(specs_of(gradients[0]))
    for gradient, expected in zip(gradients, published(gradients, density, momentum), strict=True):
        sums, state, _ = step(codec, gradient, state)
        for one, other in zip(sums, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_density_falls_exponentially_in_the_warmup():
    codec = TopK(0.001, warmup=4, momentum=0)
    densities = [codec.density_of(number) for number in range(6)]
    np.testing.assert_allclose(densities, [0.25, 0.0628717, 0.0158114, 0.00397635, 0.001, 0.001], rtol=1e-5)
    gradient = [np.random.default_rng(0).standard_normal(10_000)]
    state, counts = codec.init(specs_of(gradient)), []
    for _ in range(6):
        sums, state, _ = step(codec, gradient, state)
        counts.append(np.count_nonzero(sums[0]))
    assert counts == [2500, 629, 158, 40, 10, 10]
    assert TopK(0.5, warmup=10).density_of(0) == 0.5


@pytest.mark.parametrize("size", [1, 999, 100_000])
def test_of_equal_magnitudes_the_first_are_sent(size: int):
    gradient = [np.where(np.arange(size) % 2, -1.0, 1.0)]
    sums, _, _ = step(TopK(0.01, momentum=0), gradient, TopK(0.01, momentum=0).init(specs_of(gradient)))
    number = max(1, round(0.01 * size))
    np.testing.assert_array_equal(np.flatnonzero(sums[0]), np.arange(number))


@pytest.mark.parametrize("period", [64, 100, 1 << 12])
def test_samples_that_mislead_change_no_result(period: int):
    """Large values only at one place of each row, or in one run: the bound misses them, or finds too many."""
    rng = np.random.default_rng(0)
    codec = TopK(0.002, momentum=0)
    spiked = rng.standard_normal(200_000).astype(np.float32)
    spiked[::period] *= 100
    run = np.full(200_000, 1e-3, np.float32)
    run[5000:5100] = rng.standard_normal(100)
    for gradient in (spiked, run, -run):
        sums, _, _ = step(codec, [gradient], codec.init(specs_of([gradient])))
        expected = published([[gradient]], 0.002, 0)[0][0]
        if gradient is spiked:
            np.testing.assert_array_equal(sums[0], expected)
        assert np.count_nonzero(sums[0]) == 400
        assert np.abs(sums[0]).sum() >= np.abs(expected).sum()


def test_zeros_are_not_sent():
    gradient = [np.array([0.0, 5.0, 0.0, 0.0])]
    _, _, message = step(TopK(1.0), gradient, TopK(1.0).init(specs_of(gradient)))
    _, _, empty = step(TopK(1.0), [np.zeros(4)], TopK(1.0).init(specs_of(gradient)))
    assert message.size == empty.size + 4 + 2


def test_half_precision_values_leave_their_rounding_error():
    codec = TopK(1.0, momentum=0, values="float16")
    gradient = [np.array([0.1, 1e6, -1e6, 1e-9])]
    sums, state, _ = step(codec, gradient, codec.init(specs_of(gradient)))
    np.testing.assert_array_equal(sums[0], np.float32(np.array([0.1, 65504, -65504, 0], np.float16)))
    np.testing.assert_allclose(sums[0] + state["residual/0"], gradient[0], rtol=1e-6)


@pytest.mark.parametrize(("values", "size"), [("float32", 4), ("float16", 2)])
def test_bytes_are_those_of_values_and_coded_gaps(values: str, size: int):
    codec = TopK(0.001, momentum=0, values=values)
    gradient = [np.random.default_rng(0).standard_normal(2_000_000)]
    _, _, message = step(codec, gradient, codec.init(specs_of(gradient)))
    bits = 8 * (message.size - frames.HEADER_BYTES - 17 - 2000 * size) / 2000
    assert bits <= 1.02 * (entropy_bits(0.001) - 1)
