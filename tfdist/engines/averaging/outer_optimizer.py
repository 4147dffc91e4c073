# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer of parameter averaging: it is given how far the replicas came on average, as a gradient.

Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1, lines 12 to 14:
theta(t) = OuterOpt(theta(t-1), theta(t-1) - mean of theta(t)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import fresh_threads, optimizer_patches
from tfdist.engines.averaging import step as averaging_step
from tfdist.step.copies import copies_of


class Outer:
    """An outer optimizer of a model's own. Every worker has the same, which computes the same.

    Args:
      strategy: the strategy.
      make: makes a Keras optimizer.
      parameters: the Keras variables that it moves.
    """

    def __init__(self, strategy: Any, make: Callable[[], Any], parameters: Sequence[Any]) -> None:
        self._strategy = strategy
        self._parameters = parameters
        self._device = strategy.extended.worker_devices[0]
        self._optimizer, self._last = fresh_threads.call(self._made, make)

    def _made(self, make: Callable[[], Any]) -> tuple[Any, list[Any]]:
        with tf.device(self._device):
            own = make()
            last = [
                keras.Variable(tf.convert_to_tensor(copies_of(parameter)[0]), dtype=parameter.dtype)
                for parameter in self._parameters
            ]
            own.build(last)
        return own, last

    @property
    def variables(self) -> list[Any]:
        """The optimizer's Keras variables."""
        return self._optimizer.variables

    def remember(self) -> tf.Tensor:
        """Takes the parameters as they are now for those of the last average."""
        with tf.device(self._device):
            for last, parameter in zip(self._last, self._parameters, strict=True):
                last.value.assign(copies_of(parameter)[0])
        return tf.constant(0)

    def move(self, means: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """From the means of the parameters to where all replicas go on."""
        with tf.device(self._device), averaging_step.context(self._strategy, 0):
            differences = [last.value - mean for last, mean in zip(self._last, means, strict=True)]
            with optimizer_patches.attributes(averaging_step.changes(self._optimizer, 1.0)):
                self._optimizer.apply(differences, self._last)
            return [tf.convert_to_tensor(last) for last in self._last]
