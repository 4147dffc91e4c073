# SPDX-License-Identifier: Apache-2.0
"""Residuals that a codec has not sent stay on their worker, for each optimizer, and go through checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import simulated
import tensorflow as tf

from tfdist.compression import Codec, HalfPrecision, SignSGD, Threshold, TopK
from tfdist.step.gradients import DIFFERENCES, ErrorFeedback

SHAPES = ((4, 3), (3,))


class Transport(simulated.SimulatedTransport):
    """With what checkpoints need."""

    def __init__(self, meeting: simulated.Meeting, worker: int, num_workers: int) -> None:
        super().__init__(meeting, worker, num_workers)
        self.index = worker
        self._met = meeting

    def broadcast(self, arrays: Sequence[np.ndarray], source: int) -> list[np.ndarray]:
        return self._met.gather(self.index, [array.copy() for array in arrays])[source]


class Model:
    """With an optimizer of two variables, or of some of them."""

    def __init__(
        self, make: Callable[[Any], Any] = lambda sgd: sgd, shapes: Sequence[tuple[int, ...]] = SHAPES
    ) -> None:
        self.variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
        self.optimizer = make(keras.optimizers.SGD(0.1))
        self.optimizer.build(self.variables)


def _on_workers(codec: Codec, num_workers: int, call: Callable[[ErrorFeedback, int], Any]) -> list[Any]:
    meeting = simulated.Meeting(num_workers)
    return simulated.on_workers(
        meeting, num_workers, lambda worker: call(ErrorFeedback(codec, Transport(meeting, worker, num_workers)), worker)
    )


def _gradients(seed: int) -> list[tf.Tensor]:
    random = np.random.default_rng(seed)
    return [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]


def _sum(feedback: ErrorFeedback, model: Any, gradients: list[tf.Tensor], **options: Any) -> list[tf.Tensor]:
    return feedback.sum(model.optimizer, gradients, model.variables, feedback._transport, **options)


def _trained(codec: Codec, num_workers: int) -> tuple[Any, list[np.ndarray]]:
    """Returns the content of a checkpoint after a step."""

    def train(feedback: ErrorFeedback, worker: int) -> Any:
        model = Model()
        _sum(feedback, model, _gradients(worker))
        return feedback.collect(model)  # pyright: ignore[reportArgumentType]

    return _on_workers(codec, num_workers, train)[0]


def _restored(codec: Codec, num_workers: int, model: Any, description: Any, arrays: list[np.ndarray]) -> Any:
    """Returns the content of the next checkpoint."""

    def take(feedback: ErrorFeedback, worker: int) -> Any:
        feedback.distribute(model, description, [] if worker else arrays)
        return feedback.collect(model)

    return _on_workers(codec, num_workers, take)[0]


@pytest.mark.parametrize("codec", [Threshold(0.7), TopK(0.2), SignSGD()])
def test_what_a_checkpoint_restores_goes_on_bit_for_bit(codec: Codec):
    def calm(feedback: ErrorFeedback, worker: int) -> Any:
        model, sums, saved = Model(), [], None
        for step in range(6):
            sums = _sum(feedback, model, _gradients(10 * step + worker))
            if step == 2:
                saved = feedback.collect(model)  # pyright: ignore[reportArgumentType]
        return sums, saved

    ends = _on_workers(codec, 2, calm)
    description, arrays = ends[0][1]
    assert ends[1][1] == (description, [])

    def resumed(feedback: ErrorFeedback, worker: int) -> Any:
        model, sums = Model(), []
        # What was kept before must not stay.
        _sum(feedback, model, _gradients(worker))
        feedback.distribute(model, description, [] if worker else arrays)  # pyright: ignore[reportArgumentType]
        for step in range(3, 6):
            sums = _sum(feedback, model, _gradients(10 * step + worker))
        return sums

    for sums, (expected, _) in zip(_on_workers(codec, 2, resumed), ends, strict=True):
        assert [each.numpy().tobytes() for each in sums] == [each.numpy().tobytes() for each in expected]


def test_other_workers_share_what_was_not_sent():
    description, arrays = _trained(Threshold(0.7), 2)
    _, shared = _restored(Threshold(0.7), 3, Model(), description, arrays)
    assert len(arrays) // 2 == len(shared) // 3 == len(SHAPES) + 2  # tau and step besides
    for index in range(len(SHAPES)):
        kept = sum(arrays[index :: len(SHAPES) + 2])
        np.testing.assert_allclose(sum(shared[index :: len(SHAPES) + 2]), kept, rtol=1e-6, atol=1e-7)
        assert np.abs(kept).max() > 0.1


def test_a_codec_without_state_saves_nothing():
    assert _trained(HalfPrecision("float16"), 2) == (None, [])


def _shapes(*shapes: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: Model(shapes=shapes)


@pytest.mark.parametrize(
    ("codec", "model"),
    [(Threshold(0.7), Model), (SignSGD(), _shapes((4, 3), (4,))), (SignSGD(), _shapes((4, 3)))],
    ids=["another codec", "another shape", "fewer variables"],
)
def test_a_checkpoint_of_another_kind_is_left_out_with_a_line(
    codec: Codec, model: Callable[[], Any], capfd: pytest.CaptureFixture[str]
):
    _, arrays = _restored(codec, 2, model(), *_trained(SignSGD(), 2))
    assert not any(array.any() for array in arrays)
    said = f"tfdist: Compression: the checkpoint has the state of {SignSGD()!r}, "
    assert capfd.readouterr().err.count(said) == 1


def test_a_checkpoint_without_state_begins_anew():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        model = Model()
        first = _sum(feedback, model, _gradients(worker))
        feedback.distribute(model, None, [])  # pyright: ignore[reportArgumentType]
        return first, _sum(feedback, model, _gradients(worker))

    ((first, again),) = _on_workers(Threshold(0.7), 1, train)
    assert [each.numpy().tobytes() for each in first] == [each.numpy().tobytes() for each in again]


def test_each_optimizer_and_each_of_its_groups_of_variables_has_a_state_of_its_own():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        first, second, twice = Model(), Model(), Model(shapes=[*SHAPES, *SHAPES])
        alone = _sum(feedback, second, _gradients(1))
        _sum(feedback, first, _gradients(0))
        halves = [
            feedback.sum(twice.optimizer, _gradients(seed), variables, feedback._transport)
            for seed, variables in ((0, twice.variables[:2]), (1, twice.variables[2:]))
        ]
        return alone, halves[1]

    ((alone, again),) = _on_workers(Threshold(0.7), 1, train)
    assert [each.numpy().tobytes() for each in alone] == [each.numpy().tobytes() for each in again]


def test_the_state_is_kept_without_the_scale_of_the_loss():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        plain, sums = Model(), []
        scaled = Model(lambda sgd: keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0))
        for step in range(3):
            scale = tf.convert_to_tensor(scaled.optimizer.dynamic_scale)
            expected = _sum(feedback, plain, _gradients(step))
            found = _sum(feedback, scaled, [each * scale for each in _gradients(step)])
            sums += [(total / scale, wanted) for total, wanted in zip(found, expected, strict=True)]
            scaled.optimizer.dynamic_scale.assign(2 * scale)
        return sums

    (pairs,) = _on_workers(Threshold(0.7), 1, train)
    for total, wanted in pairs:
        np.testing.assert_array_equal(total, wanted)


def test_gradients_and_differences_of_the_same_variables_have_states_of_their_own():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        model, other = Model(), Model()
        alone = _sum(feedback, other, _gradients(1), kind=DIFFERENCES)
        _sum(feedback, model, _gradients(0))
        return alone, _sum(feedback, model, _gradients(1), kind=DIFFERENCES)

    ((alone, again),) = _on_workers(Threshold(0.7), 1, train)
    assert [each.numpy().tobytes() for each in alone] == [each.numpy().tobytes() for each in again]


def test_the_order_of_the_variables_does_not_matter():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        model, other = Model(), Model()
        found = []
        for step in range(2):
            expected = _sum(feedback, model, _gradients(step))
            backwards = _gradients(step)[::-1], other.variables[::-1]
            if step:
                found = feedback.sum(other.optimizer, *backwards, feedback._transport)[::-1]
            else:
                _sum(feedback, other, _gradients(step))
        return found, expected

    ((found, expected),) = _on_workers(Threshold(0.7), 1, train)
    assert [each.numpy().tobytes() for each in found] == [each.numpy().tobytes() for each in expected]


def test_other_workers_get_the_mean_of_differences_that_were_not_sent():
    def train(feedback: ErrorFeedback, worker: int) -> Any:
        model = Model()
        _sum(feedback, model, _gradients(worker), kind=DIFFERENCES)
        return feedback.collect(model)  # pyright: ignore[reportArgumentType]

    description, arrays = _on_workers(Threshold(0.7), 2, train)[0]
    _, shared = _restored(Threshold(0.7), 1, Model(), description, arrays)
    np.testing.assert_allclose(shared[0], (arrays[0] + arrays[len(shared)]) / 2, rtol=1e-6)
