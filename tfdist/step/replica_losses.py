# SPDX-License-Identifier: Apache-2.0
"""Patches a step of one replica so that its losses count as on one device, where no reduction follows in the step.

Keras weights the loss of a replica by its examples, and divides losses and penalties by the number of replicas. Both
are wrong for losses that are sums over the examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import models
from tfdist.passes import splitting
from tfdist.step import loss_weights
from tfdist.step.model_losses import is_sum


@dataclasses.dataclass(frozen=True)
class ReplicaLosses:
    """The losses of a model in the step of one replica.

    Attributes:
      model: the model.
      num_replicas: largest number of replicas.
      divisor: Keras' divisor of each replica's loss: `num_replicas_in_sync` of the strategy.
      are_sums: True if the losses are sums over the examples, and not means.

    Raises:
      ValueError: the model has losses of both kinds.
    """

    model: keras.Model
    num_replicas: int
    divisor: int
    are_sums: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        kinds = {is_sum(loss) for loss in models.compiled_losses(self.model)}
        if len(kinds) > 1:
            raise ValueError(
                "compile(loss=...): under policies all losses must have one kind of reduction, a sum or a mean, so "
                "that a replica's gradient can be weighed. Received: both kinds"
            )
        object.__setattr__(self, "are_sums", True in kinds)

    def trackers(self, batch: Any, batch_rows: tf.Tensor | None) -> list[tuple[Any, str, Any]]:
        """Returns patches by which metrics of losses count as on one device.

        Keras weights each replica's loss by its examples, which is wrong for sums; it doesn't weight the losses of
        single outputs.

        Args:
          batch: the replica's part.
          batch_rows: number of examples in all parts together, if known.
        """
        rows = splitting.rows(batch)
        if rows is None or not models.compiled_losses(self.model):
            return []
        total = None
        # Without the size of the batch each part counts alike, unless it is empty.
        single: Any = None if self.are_sums else tf.cast(rows > 0, tf.float32)
        if batch_rows is not None:
            total = batch_rows / self.num_replicas if self.are_sums else None
            single = 1 / self.num_replicas if self.are_sums else rows / tf.maximum(batch_rows, 1)
        # The mean over replicas of the scaled sums is the total. Keras has multiplied by `divisor` already.
        scale = self.num_replicas / self.divisor if self.are_sums else 1.0
        weights = [(models.tracker_of(self.model), total)]
        # One for each loss, or none for a single one.
        weights += [(metric, single) for metric in models.trackers_of_single(self.model)]
        return [(metric, "update_state", _weighing(metric, scale, weight, rows)) for metric, weight in weights]

    def scalars(self, batch: Any, batch_rows: tf.Tensor | None) -> list[tuple[Any, str, Any]]:
        """Returns patches by which metrics count a number of the batch once, and not once on each replica.

        For a step that computes losses of its own. Where the batch's size is not known, all parts count alike.

        Args:
          batch: the replica's part.
          batch_rows: number of examples in all parts together, if known.
        """
        rows = splitting.rows(batch)
        if self.num_replicas == 1:
            return []
        share: Any = 1 / self.num_replicas
        if rows is not None:
            share = tf.where(rows > 0, tf.cast(share, tf.float64), 0.0)
            share = share if batch_rows is None else rows / tf.maximum(batch_rows, 1)
        of_scalars = [metric for metric in self.model.metrics if type(metric) in loss_weights.OF_SCALARS]
        return [(each, "update_state", loss_weights.weighing_scalars(each, lambda: share)) for each in of_scalars]

    def trackers_of_sums(self, is_total_known: bool) -> list[Any]:
        """Returns the metrics of losses that are sums: a replica without examples adds a sum of 0 to their means.

        Args:
          is_total_known: whether `trackers` was given the number of all examples.
        """
        if not self.are_sums:
            return []
        # Without the number, the whole loss is weighted by the replica's examples.
        whole = [models.tracker_of(self.model)] if is_total_known else []
        return whole + models.trackers_of_single(self.model)

    def penalties(self, batch: Any, batch_rows: tf.Tensor | None) -> list[tuple[Any, str, Any]]:
        """Returns patches that weight penalties by the replica's examples if losses are sums, as on one device.

        Args:
          batch: the replica's part.
          batch_rows: number of examples in all parts together, if known.
        """
        if not self.are_sums or self.num_replicas == 1:
            return []
        rows = splitting.rows(batch)
        is_known = rows is not None and batch_rows is not None
        share = rows / tf.maximum(batch_rows, 1) if is_known else 1 / self.num_replicas
        # Keras has divided them by `divisor`.
        return [models.multiplied_losses(self.model, lambda: share * self.divisor)]


def _weighing(metric: Any, scale: float, weight: Any, rows: tf.Tensor) -> Callable[..., Any]:
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        # Losses that layers add are usually means, which are NaN if there are no examples.
        values = tf.where(rows > 0, values, tf.zeros_like(values))
        values = values if scale == 1.0 else values * tf.cast(scale, values.dtype)
        return update_state(values, sample_weight=sample_weight if weight is None else tf.cast(weight, tf.float32))

    return update
