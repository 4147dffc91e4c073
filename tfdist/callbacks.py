# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks for training under a tfdist strategy. Resume and Telemetry live in rooms of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _checks, _log, cluster
from tfdist.resume.callback import Resume
from tfdist.telemetry.callback import Telemetry

__all__ = ["Resume", "ScaleLearningRate", "Telemetry"]


class ScaleLearningRate(keras.callbacks.Callback):
    """Multiplies the learning rate by the number of gradients in an update.

    The factor follows `strategy.replicas_to_aggregate`: 1 during a `Warmup` phase, n - b with
    `BackupWorkers(spares=b)` of n replicas, and so on. When the number rises, the factor rises linearly within
    `warmup_steps`. When it falls, the factor falls at once. A rate that another callback sets, such as
    ReduceLROnPlateau, counts as already scaled. At the end of `fit` the optimizer has the unscaled rate again.
    The chief says the rate for a number of replicas that is higher than before.

    Source: Goyal et al. 2017, arXiv 1706.02677, sections 2.1 and 2.2.

    Args:
      warmup_steps: number of updates in which the factor reaches a higher number; 0 or more. Goyal et al. use 5 epochs.
      strategy: a tfdist strategy; by default the one in whose scope the model was built.
      base_rate: learning rate for the batch of one replica; by default the optimizer's rate when `fit` begins.

    Raises:
      ValueError: an argument is invalid, or the optimizer has a schedule.
    """

    def __init__(
        self, warmup_steps: int, *, strategy: tf.distribute.Strategy | None = None, base_rate: float | None = None
    ) -> None:
        super().__init__()
        if not _checks.is_count(warmup_steps, at_least=0):
            raise ValueError(
                "ScaleLearningRate(warmup_steps=...) must be a whole number, 0 or more. "
                f"Received: warmup_steps={warmup_steps!r}"
            )
        if base_rate is not None and not 0 < base_rate < float("inf"):
            raise ValueError(
                f"ScaleLearningRate(base_rate=...) must be a positive number. Received: base_rate={base_rate!r}"
            )
        self._warmup_steps = warmup_steps
        self._strategy = strategy
        self._given = base_rate
        self._step = 0
        # The factor goes from `_from`, at step `_since`, to `_target`.
        self._from = self._factor = 1.0
        self._target, self._since = 1, 0
        # The highest number of which a line was said.
        self._told = 1
        # The unscaled rate, and the rate that was set last.
        self._base = self._rate = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Reads the unscaled rate, and sets the scaled one."""
        self._strategy = self._strategy or self.model.distribute_strategy
        if not hasattr(self._strategy, "replicas_to_aggregate"):
            raise ValueError(
                "ScaleLearningRate(strategy=...): give a tfdist strategy, or make the model in the scope of one. "
                f"Received: {type(self._strategy).__name__}"
            )
        self._base = self._rate = self._read() if self._given is None else self._given
        try:
            self._set(self._factor)
        except TypeError:
            raise ValueError(
                "ScaleLearningRate: the optimizer has a learning-rate schedule, which can't be scaled from outside; "
                "give it a number, or tfdist.schedules.LinearScaling(schedule, ...) instead of this callback."
            ) from None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate, if the factor has changed."""
        number = self._strategy.replicas_to_aggregate
        if number != self._target:
            if number > self._told and cluster.is_chief():
                _log.say(
                    f"ScaleLearningRate: {self._base:g} x {number} replicas = {self._base * number:g} after "
                    f"{self._warmup_steps} steps, for a batch that is {number} times that of one replica"
                )
            self._told = max(number, self._told)
            self._from, self._target, self._since = self._factor, number, self._step
        factor = self._factor_now()
        if factor != self._factor:
            self._base = self._unscaled()
            self._set(factor)
        self._step += self.model.steps_per_execution

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the logs."""
        if logs is not None:
            logs["learning_rate"] = self._read()

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the unscaled rate."""
        self.model.optimizer.learning_rate = self._unscaled()

    def _factor_now(self) -> float:
        if self._target <= self._from or not self._warmup_steps:
            return float(self._target)
        progress = min(1.0, (self._step - self._since) / self._warmup_steps)
        return self._from + (self._target - self._from) * progress

    def _read(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _unscaled(self) -> float:
        """Returns the rate without the factor, by that of another callback if it has set one."""
        rate = self._read()
        return self._base if np.isclose(rate, self._rate, rtol=1e-6, atol=0.0) else rate / self._factor

    def _set(self, factor: float) -> None:
        self._factor, self._rate = factor, self._base * factor
        self.model.optimizer.learning_rate = self._rate
