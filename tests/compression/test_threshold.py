# SPDX-License-Identifier: Apache-2.0
"""Threshold: the published algorithm, its adaptive tau, its bytes and its clipping."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import Threshold, frames

pytestmark = pytest.mark.devices


def run(codec: Threshold, gradients: list[np.ndarray]) -> tuple[list[np.ndarray], dict[str, tf.Tensor], list[int]]:
    """Sums of one tensor by step, the last state, and the bytes of each message."""
    state = codec.init([tf.TensorSpec(gradients[0].shape, tf.float32)])
    sums, sizes = [], []
    for gradient in gradients:
        message, state = codec.encode([tf.constant(gradient, tf.float32)], state)
        sizes.append(int(tf.size(message)))
        spec = tf.TensorSpec(gradient.shape, tf.float32)
        sums.append(codec.decode(message[None], [spec], ["worker:0"])[0].numpy())
    return sums, state, sizes


def test_steps_follow_stroms_formula():
    """A transcription: r += g; +-tau where |r| > tau; r -= what was sent."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(1000).astype(np.float32) for _ in range(8)]
    kept, tau = np.zeros(1000, np.float32), np.float32(2.25)
    expected = []
    for gradient in gradients:
        kept += gradient
        sent = np.where(kept > tau, tau, np.where(kept < -tau, -tau, np.float32(0)))
        kept -= sent
        expected.append(sent)
    sums, state, _ = run(Threshold(2.25, clip_every=None), gradients)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(state["residual/0"], kept)
    assert int(state["step"]) == 8 and float(state["tau"]) == 2.25


def test_a_value_equal_to_tau_is_kept():
    sums, state, _ = run(Threshold(0.5), [np.array([0.5, -0.5, 0.50001])])
    np.testing.assert_allclose(sums[0], [0, 0, 0.5])
    np.testing.assert_allclose(state["residual/0"], [0.5, -0.5, 1e-5], atol=1e-6)


def test_a_tau_that_no_value_exceeds_sends_an_empty_message():
    sums, state, sizes = run(Threshold(1e30), [np.arange(1000.0)] * 2)
    assert sizes == [frames.HEADER_BYTES + 12] * 2
    assert not sums[1].any()
    np.testing.assert_array_equal(state["residual/0"], 2 * np.arange(1000.0))


def test_dense_steps_send_a_bitmap_of_2_bits():
    rng = np.random.default_rng(1)
    gradients = [rng.standard_normal((331, 401)) for _ in range(2)]
    sums, state, sizes = run(Threshold(0.25, clip_every=None), gradients)
    values = 331 * 401
    assert sizes == [frames.HEADER_BYTES + 12 + (values + 3) // 4] * 2
    assert set(np.unique(sums[0])) == {-0.25, 0.0, 0.25}
    np.testing.assert_allclose(sum(sums) + state["residual/0"], sum(gradients), atol=1e-5)


def test_coded_gaps_are_shorter_than_a_bitmap_at_all_densities_below_a_quarter():
    for density in (1 / 16, 1 / 8, 0.24):
        gradient = np.random.default_rng(2).random(100_000) < density
        _, _, (coded,) = run(Threshold(0.5), [gradient])
        assert coded < frames.HEADER_BYTES + 12 + 25_000 * 0.6


def test_residuals_are_clipped_to_5_tau_every_5_steps():
    gradient = np.array([3.0, -3.0, 0.1])
    for steps, expected in ((4, [8.0, -8.0, 0.4]), (5, [5.0, -5.0, 0.5]), (6, [7.0, -7.0, 0.6])):
        _, state, _ = run(Threshold(1.0), [gradient] * steps)
        np.testing.assert_allclose(state["residual/0"], expected, rtol=1e-5)
    _, state, _ = run(Threshold(1.0, clip_every=None), [gradient] * 6)
    np.testing.assert_allclose(state["residual/0"], [12.0, -12.0, 0.6], rtol=1e-5)


def test_the_first_adaptive_tau_sends_the_wanted_fraction():
    gradient = np.random.default_rng(0).standard_normal(2_000_000)
    sums, state, _ = run(Threshold(), [gradient])
    assert np.count_nonzero(sums[0]) / gradient.size == pytest.approx(1e-3, rel=0.3)
    assert float(state["tau"]) == pytest.approx(3.29, rel=0.05)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e8])
def test_adaptive_tau_keeps_the_density_within_its_bounds(scale: float):
    rng = np.random.default_rng(0)
    codec = Threshold(min_density=1e-3, max_density=5e-3)
    sums, _, _ = run(codec, [scale * rng.standard_normal(20_000) for _ in range(150)])
    densities = np.array([np.count_nonzero(total) for total in sums]) / 20_000
    assert densities[0] < 1e-2
    assert (densities[-30:] < 7e-3).all() and (densities[-30:] > 5e-4).all()


def test_adaptive_tau_doubles_or_halves_in_20_steps():
    ones = [np.ones(100) * 2.0**step for step in range(0, 40, 2)]
    _, before, _ = run(Threshold(clip_every=None), ones[:1])
    _, after, _ = run(Threshold(clip_every=None), ones)
    # The first step's density is adapted to in both.
    assert float(after["tau"]) == pytest.approx(float(before["tau"]) * 2 ** (19 / 20), rel=1e-4)
    silence = [np.ones(100), *[np.zeros(100)] * 60]
    _, last, _ = run(Threshold(clip_every=None), silence)
    _, earlier, _ = run(Threshold(clip_every=None), silence[:-20])
    assert float(last["tau"]) == pytest.approx(float(earlier["tau"]) / 2, rel=1e-4)


def test_a_single_value_among_zeros_sets_tau_and_is_sent():
    gradient = np.zeros(1_000_000)
    sums, state, _ = run(Threshold(), [gradient])
    assert float(state["tau"]) == 0 and not sums[0].any()
    gradient[777_777] = -3.0
    sums, state, _ = run(Threshold(), [gradient])
    assert sums[0][777_777] < 0 and float(state["tau"]) > 0


def test_workers_with_different_taus_are_added():
    codec, spec = Threshold(), tf.TensorSpec([4], tf.float32)
    messages = [codec.encode([tf.constant(values)], codec.init([spec]))[0] for values in ([1.0] * 4, [-64.0] * 4)]
    rows = tf.stack(messages) if messages[0].shape == messages[1].shape else None
    assert rows is not None
    np.testing.assert_allclose(codec.decode(rows, [spec], ["a", "b"])[0], [0.5 - 32.0] * 4)
