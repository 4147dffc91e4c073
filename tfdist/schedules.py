# SPDX-License-Identifier: Apache-2.0
"""Keras learning-rate schedules for training on several replicas."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import _checks

__all__ = ["LinearScaling"]


@keras.saving.register_keras_serializable("tfdist")
class LinearScaling(keras.optimizers.schedules.LearningRateSchedule):
    """Linear scaling rule with gradual warmup: the rate for one replica times the number of replicas.

        rate(step) = base_rate(step) * (1 + (replicas - 1) * p)
        p = (step - alone_steps) / warmup_steps, but 0 before and 1 after

    Source: Goyal et al. 2017, Accurate, Large Minibatch SGD, arXiv 1706.02677. Section 2.1 multiplies the rate by k
    when the batch is k times as large. Section 2.2 starts at the rate of one replica, and reaches k times that rate in
    about 5 epochs.

    Args:
      base_rate: learning rate for the batch of one replica: a number, or a schedule.
      replicas: k, the number of gradients in an update; n - b with `BackupWorkers(spares=b)` of n replicas.
      warmup_steps: number of updates in which the factor rises from 1 to k; 0 or more.
      alone_steps: number of updates before, in which one replica trains alone and the factor is 1: the `steps` of
        `Warmup`.
      name: name of the schedule.

    Raises:
      ValueError: an argument is invalid.
    """

    def __init__(
        self,
        base_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        replicas: int,
        warmup_steps: int,
        *,
        alone_steps: int = 0,
        name: str = "LinearScaling",
    ) -> None:
        super().__init__()
        is_schedule = isinstance(base_rate, keras.optimizers.schedules.LearningRateSchedule)
        if not is_schedule and not (_checks.is_number(base_rate) and base_rate > 0):
            raise ValueError(
                "LinearScaling(base_rate=...): give a positive number or a keras.optimizers.schedules object. "
                f"Received: base_rate={base_rate!r}"
            )
        for argument, value, least in (
            ("replicas", replicas, 1),
            ("warmup_steps", warmup_steps, 0),
            ("alone_steps", alone_steps, 0),
        ):
            if not _checks.is_count(value, at_least=least):
                raise ValueError(
                    f"LinearScaling({argument}=...) must be a whole number, {least} or more. "
                    f"Received: {argument}={value!r}"
                )
        self.base_rate = base_rate
        self.replicas = replicas
        self.warmup_steps = warmup_steps
        self.alone_steps = alone_steps
        self.name = name

    def __call__(self, step: Any) -> Any:
        """Returns the rate of update number `step`, counted from 0, as a float32 scalar."""
        base = self.base_rate(step) if callable(self.base_rate) else keras.ops.cast(self.base_rate, "float32")
        since = keras.ops.cast(step, "float32") - self.alone_steps
        if self.warmup_steps:
            progress = keras.ops.clip(since / self.warmup_steps, 0.0, 1.0)
        else:
            progress = keras.ops.cast(since >= 0, "float32")
        return base * (1.0 + (self.replicas - 1) * progress)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which `from_config` builds the same schedule."""
        rate = self.base_rate
        return {
            "base_rate": keras.saving.serialize_keras_object(rate) if callable(rate) else rate,
            "replicas": self.replicas,
            "warmup_steps": self.warmup_steps,
            "alone_steps": self.alone_steps,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinearScaling:
        """Builds the schedule that `get_config` described."""
        rate = config["base_rate"]
        rate = keras.saving.deserialize_keras_object(rate) if isinstance(rate, dict) else rate
        return cls(**{**config, "base_rate": rate})
