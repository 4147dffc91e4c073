# SPDX-License-Identifier: Apache-2.0
"""What a codec has not sent stays on its worker, for each optimizer, and goes through checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import simulated
import tensorflow as tf

from tfdist.compression import Codec, HalfPrecision, SignSGD, Threshold, TopK
from tfdist.compression.error_feedback import ErrorFeedback

SHAPES = ((4, 3), (3,))


class Transport(simulated.SimulatedTransport):
    """With what checkpoints need."""

    def __init__(self, meeting: simulated.Meeting, worker: int, num_workers: int) -> None:
        super().__init__(meeting, worker, num_workers)
        self.index = worker
        self._met = meeting

    def broadcast(self, arrays: Sequence[np.ndarray], source: int) -> list[np.ndarray]:
        return self._met.gather(self.index, [array.copy() for array in arrays])[source]


def _on_workers(codec: Codec, num_workers: int, call: Callable[[ErrorFeedback, int], Any]) -> list[Any]:
    meeting = simulated.Meeting(num_workers)
    return simulated.on_workers(
        meeting, num_workers, lambda worker: call(ErrorFeedback(codec, Transport(meeting, worker, num_workers)), worker)
    )


def _gradients(seed: int) -> list[tf.Tensor]:
    random = np.random.default_rng(seed)
    return [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]


def _optimizer() -> Any:
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize("codec", [Threshold(0.7), TopK(0.2), SignSGD()])
def test_what_a_checkpoint_restores_goes_on_bit_for_bit(codec: Codec):
    def calm(feedback: ErrorFeedback, worker: int) -> Any:
        optimizer, sums = _optimizer(), []
        for step in range(6):
            sums = feedback.sum(optimizer, _gradients(10 * step + worker))
            if step == 2:
                saved = feedback.collect([optimizer])
        return sums, saved

    ends = _on_workers(codec, 2, calm)
    description, arrays = ends[0][1]
    assert ends[1][1] == (description, [])

    def resumed(feedback: ErrorFeedback, worker: int) -> Any:
        optimizer = _optimizer()
        assert feedback.distribute([optimizer], description, [] if worker else arrays)
        for step in range(3, 6):
            sums = feedback.sum(optimizer, _gradients(10 * step + worker))
        return sums

    for sums, (expected, _) in zip(_on_workers(codec, 2, resumed), ends, strict=True):
        assert [each.numpy().tobytes() for each in sums] == [each.numpy().tobytes() for each in expected]


def test_other_workers_share_what_was_not_sent():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        optimizer = _optimizer()
        feedback.sum(optimizer, _gradients(worker))
        return feedback.collect([optimizer])

    description, arrays = _on_workers(Threshold(0.7), 2, train)[0]

    def grown(feedback: ErrorFeedback, worker: int) -> Any:
        optimizer = _optimizer()
        assert feedback.distribute([optimizer], description, [] if worker else arrays)
        return feedback.collect([optimizer])

    _, shared = _on_workers(Threshold(0.7), 3, grown)[0]
    assert len(arrays) // 2 == len(shared) // 3 == len(SHAPES) + 2  # tau and step besides
    for index in range(len(SHAPES)):
        kept = sum(arrays[index :: len(SHAPES) + 2])
        np.testing.assert_allclose(sum(shared[index :: len(SHAPES) + 2]), kept, rtol=1e-6, atol=1e-7)
        assert np.abs(kept).max() > 0.1


def test_a_codec_without_state_saves_nothing_and_another_one_begins_anew(capsys: pytest.CaptureFixture[str]):
    def train(codec: Codec) -> Callable[..., Any]:
        def call(feedback: ErrorFeedback, worker: int) -> Any:
            optimizer = _optimizer()
            feedback.sum(optimizer, _gradients(worker))
            return feedback.collect([optimizer])

        return lambda: _on_workers(codec, 2, call)[0]

    assert train(HalfPrecision("float16"))() == (None, [])
    description, arrays = train(SignSGD())()
    taken = _on_workers(
        Threshold(0.7), 2, lambda feedback, worker: feedback.distribute([_optimizer()], description, arrays)
    )
    assert taken == [False, False]


def test_each_optimizer_has_a_state_of_its_own():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        first, second = _optimizer(), _optimizer()
        alone = feedback.sum(second, _gradients(1))
        feedback.sum(first, _gradients(0))
        again = ErrorFeedback(Threshold(0.7), Transport(simulated.Meeting(1), 0, 1)).sum(_optimizer(), _gradients(1))
        return alone, again

    ((alone, again),) = _on_workers(Threshold(0.7), 1, train)
    assert [each.numpy().tobytes() for each in alone] == [each.numpy().tobytes() for each in again]


def test_the_state_is_kept_without_the_scale_of_the_loss():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        plain, scaled, sums = _optimizer(), keras.optimizers.LossScaleOptimizer(_optimizer(), initial_scale=8.0), []
        scaled.build([keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES])
        for step in range(3):
            scale = tf.convert_to_tensor(scaled.dynamic_scale)
            expected = feedback.sum(plain, _gradients(step))
            found = feedback.sum(scaled, [each * scale for each in _gradients(step)])
            sums += [(total / scale, wanted) for total, wanted in zip(found, expected, strict=True)]
            scaled.dynamic_scale.assign(2 * scale)
        return sums

    (pairs,) = _on_workers(Threshold(0.7), 1, train)
    for total, wanted in pairs:
        np.testing.assert_array_equal(total, wanted)
