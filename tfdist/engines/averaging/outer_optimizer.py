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

from tfdist.compat import fresh_threads, optimizer_patches, plain_loops
from tfdist.engines.averaging import step as averaging_step
from tfdist.step.copies import copies_of


class LastAverage:
    """The parameters at the last average. Every worker has the same.

    Args:
      strategy: the strategy.
      parameters: Keras variables.

    Attributes:
      device: where the values are.
      values: Keras variables, one for each parameter.
    """

    def __init__(self, strategy: Any, parameters: Sequence[Any]) -> None:
        self._parameters = parameters
        self.device = strategy.extended.worker_devices[0]
        self.values = fresh_threads.call(self._made)

    def _made(self) -> list[Any]:
        with tf.device(self.device):
            return [
                keras.Variable(tf.convert_to_tensor(copies_of(parameter)[0]), dtype=parameter.dtype)
                for parameter in self._parameters
            ]

    def remember(self) -> tf.Tensor:
        """Takes the parameters as they are now for those of the last average."""
        with tf.device(self.device):
            for last, parameter in zip(self.values, self._parameters, strict=True):
                last.value.assign(copies_of(parameter)[0])
        return tf.constant(0)


class Outer:
    """An outer optimizer of a model's own. Every worker has the same, which computes the same.

    Args:
      strategy: the strategy.
      make: makes a Keras optimizer.
      last: the parameters that it moves, as they were at the last average.
    """

    def __init__(self, strategy: Any, make: Callable[[], Any], last: LastAverage) -> None:
        self._strategy = strategy
        self._last = last
        self._optimizer = fresh_threads.call(self._made, make)

    def _made(self, make: Callable[[], Any]) -> Any:
        with tf.device(self._last.device):
            own = make()
            own.build(self._last.values)
        return own

    @property
    def variables(self) -> list[Any]:
        """The optimizer's Keras variables."""
        return self._optimizer.variables

    def move(self, means: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """From the means of the parameters to where all replicas go on."""
        last = self._last.values
        with tf.device(self._last.device), averaging_step.context(self._strategy, 0):
            differences = [each.value - mean for each, mean in zip(last, means, strict=True)]
            changes = optimizer_patches.attributes(averaging_step.changes(self._optimizer, 1.0))
            # The variables are this process' own.
            with plain_loops.checked(self._strategy), changes:
                self._optimizer.apply(differences, last)
            return [tf.convert_to_tensor(each) for each in last]
