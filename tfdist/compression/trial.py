# SPDX-License-Identifier: Apache-2.0
"""Trial steps: the first training steps under `Compression("auto")`, whose gradients and seconds decide about a codec.

Trial steps train: their gradients are summed as they are. Each worker keeps a copy of its own gradients of the last
such step.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import process_variable
from tfdist.compression import error_feedback

# Calls of the train function that are timed. All workers time as many, so that all choose after the same step.
_CALLS = 5


class Trial:
    """Trial steps of one worker.

    Args:
      sum_dense: sums dense gradients as they are, in any context.
    """

    def __init__(self, sum_dense: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]) -> None:
        self._sum_dense = sum_dense
        # By optimizer and variables, as a step may be traced several times.
        self._kept: dict[Any, list[tf.Variable]] = {}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._steps = process_variable.of(tf.zeros([], tf.int64), "trial_steps")
        self._steps_before: int | None = None
        self._secs: list[float] = []

    @property
    def is_complete(self) -> bool:
        """True after enough steps."""
        return len(self._secs) >= _CALLS

    @property
    def step_secs(self) -> float:
        """Median of the seconds of a step."""
        return statistics.median(self._secs)

    def gradients(self) -> list[tf.Tensor]:
        """Returns this worker's gradients of the last step, float32; a value that is not finite is a zero."""
        return [each.read_value() for kept in self._kept.values() for each in kept]

    def sum_all(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums gradients as they are (`optimizer_patches.SumGradients`), and keeps the dense ones."""
        return error_feedback.sum_all(functools.partial(self._sum, optimizer), gradients, variables)

    def after_call(self, secs: float) -> None:
        """Takes the time of a call of the train function, which may have made several steps."""
        steps, before = int(self._steps.numpy()), self._steps_before
        self._steps_before = steps
        # The first observed call follows the one that traced the step, whose steps were counted too.
        if before is not None and steps > before:
            self._secs.append(secs / (steps - before))

    def _sum(self, optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> Sequence[tf.Tensor]:
        if not gradients:
            return []
        self._keep(optimizer, variables, gradients)
        return self._sum_dense(gradients)

    def _keep(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[tf.Tensor]) -> None:
        key = optimizer, tuple(id(variable) for variable in variables)
        if key not in self._kept:
            with tf.init_scope():
                self._kept[key] = [process_variable.of(tf.zeros(each.shape), "trial_gradient") for each in gradients]
        scale = error_feedback.loss_scale(optimizer)
        for variable, gradient in zip(self._kept[key], gradients, strict=True):
            value = tf.cast(gradient, tf.float32) / (1.0 if scale is None else scale)
            variable.assign(tf.where(tf.math.is_finite(value), value, 0.0), read_value=False)
        if key == next(iter(self._kept)):
            self._steps.assign_add(1, read_value=False)
