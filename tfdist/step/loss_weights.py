# SPDX-License-Identifier: Apache-2.0
"""Weights of each replica's gradients and losses, by which their sum is the gradient or loss of the global batch.

A mean over a replica's examples is weighted by the replica's share of the batch; a sum is not weighted. Keras divides
its own means by the number of replicas, except within `global_losses.counted_as_one`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import models
from tfdist.compat.tensorflow import replicas
from tfdist.passes.shares import Shares
from tfdist.step import contribution
from tfdist.step.model_losses import is_sum

# Metrics by which a step of its own keeps numbers of a batch, such as its loss.
OF_SCALARS = (keras.metrics.Mean, keras.metrics.Sum)


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """The weights of one step.

    Attributes:
      model: the model.
      shares: the replicas' shares of the batch; None if they are known to be equal.
      num_replicas: replicas on all workers.
      has_own_loss: True if the step's losses were not divided by the number of replicas.
    """

    model: keras.Model
    shares: Shares | None
    num_replicas: int
    has_own_loss: bool

    @property
    def transform(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Function that weights a replica's gradients for the sum over replicas; None if the weights are 1."""
        if self.has_own_loss:
            return lambda gradients: [None if g is None else contribution.times(g, self._share()) for g in gradients]
        if self.shares is None:
            return None
        if self._are_all_sums():
            return functools.partial(_of_examples, self.shares)
        weigh = _if_even if sum_losses(self.model) else _weighed
        return functools.partial(weigh, self.shares)

    @property
    def unit(self) -> int:
        """The factor from a replica's gradient to that of a device which has the replica's examples alone."""
        return 1 if self.has_own_loss or self._are_all_sums() else self.num_replicas

    def of_losses(self) -> list[tuple[Any, str, Any]]:
        """Returns patches for `optimizers.patched_attributes` that weight losses and their metrics as on one device."""
        weighing: dict[int, tuple[Any, Callable[..., Any]]] = {}
        if self.has_own_loss:
            of_scalars = [metric for metric in self.model.metrics if type(metric) in OF_SCALARS]
            weighing |= {id(metric): (metric, weighing_scalars(metric, self._share)) for metric in of_scalars}
        if self.shares is None or not models.compiled_losses(self.model):
            return [(metric, "update_state", update) for metric, update in weighing.values()]
        tracker = models.tracker_of(self.model)
        weighing.setdefault(id(tracker), (tracker, _without_nan(tracker)))
        rows = self.shares.rows
        weighing |= {id(metric): (metric, _weighing(metric, rows, *how)) for metric, *how in self._of_keras_losses()}
        changes = [(metric, "update_state", update) for metric, update in weighing.values()]
        if self._are_all_sums():
            # Keras divides penalties by the number of replicas, and they are means over the replica's examples.
            changes.append(models.multiplied_losses(self.model, lambda: self._share() * self.num_replicas))
        return changes

    def trackers_of_sums(self) -> list[Any]:
        """Returns the metrics of losses that are sums: a replica without examples adds a sum of 0 to their means."""
        losses, single = models.compiled_losses(self.model), models.trackers_of_single(self.model)
        trackers = [models.tracker_of(self.model)] if self._are_all_sums() else []
        return trackers + [metric for metric, loss in zip(single, losses, strict=False) if is_sum(loss)]

    def _of_keras_losses(self) -> list[tuple[Any, Callable[[], Any], Any]]:
        """Returns the metrics of losses that Keras weights wrongly, with the correct weights and factors.

        Keras weights each replica's loss by its examples, which is wrong for sums; it doesn't weight the losses of
        single outputs.
        """
        shares, sums = self.shares, sum_losses(self.model)
        is_sum = [loss in sums for loss in models.compiled_losses(self.model)]
        # Keras multiplies a sum by the number of replicas, so the mean over those that count is the sum over all.
        holders = shares.num_replicas if shares.holders is None else tf.cast(shares.holders, tf.float64)
        factor = None if shares.holders is None else holders / shares.num_replicas
        # A replica whose copy of the batch does not count has no part in the mean; one without examples has.
        counts = lambda: tf.cast(shares.holds[replicas.current()], tf.float64) if shares.holds else 1.0  # noqa: E731
        total = tf.cast(shares.total, tf.float64)
        tracker = (models.tracker_of(self.model), lambda: total * counts() / holders, factor)
        trackers: list[Any] = [tracker] if self._are_all_sums() else []
        # One for each loss, or none for a single one.
        for metric, summed in zip(models.trackers_of_single(self.model), is_sum, strict=False):
            trackers.append((metric, lambda: counts() / holders, factor) if summed else (metric, self._share, None))
        return trackers

    def _are_all_sums(self) -> bool:
        count = len(models.compiled_losses(self.model))
        return count > 0 and count == len(sum_losses(self.model))

    def _share(self) -> Any:
        return self.shares.of_this_replica() if self.shares else 1 / self.num_replicas


def has_both_kinds(model: keras.Model) -> bool:
    """Returns True if some losses of the model are sums over the examples, and others are means."""
    return 0 < len(sum_losses(model)) < len(models.compiled_losses(model))


def sum_losses(model: keras.Model) -> list[Any]:
    """Returns the losses of the model that are sums over the examples."""
    return [loss for loss in models.compiled_losses(model) if is_sum(loss)]


def _weighed(shares: Shares, gradients: Sequence[Any]) -> list[Any]:
    """Weights gradients of a mean over this replica's examples, which Keras has divided by the number of replicas."""
    replica = replicas.current()
    share = shares.of_replica(replica) * shares.num_replicas
    # In the usual case of an even batch no gradient is copied.
    return _chosen(shares.is_even(replica), gradients, share)


def _of_examples(shares: Shares, gradients: Sequence[Any]) -> list[Any]:
    """Takes gradients of sums over the examples from the replicas whose examples count; the others give zeros."""
    return _chosen(shares.rows[replicas.current()] > 0, gradients, 0.0)


def _chosen(condition: tf.Tensor, gradients: Sequence[Any], otherwise: Any) -> list[Any]:
    """Returns the gradients themselves if the condition holds, else multiplied by `otherwise`."""
    # The rows of sparse gradients stay outside of the conditional, for `optimizers`.
    present = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
    chosen = tf.cond(
        condition, lambda: _same(present), lambda: [contribution.times(each, otherwise) for each in present]
    )
    rest = iter([chosen] if len(present) == 1 and not isinstance(chosen, list | tuple) else chosen)
    return [None if gradient is None else _with_values(gradient, next(rest)) for gradient in gradients]


def _if_even(shares: Shares, gradients: Sequence[Any]) -> list[Any]:
    """Raises at an uneven batch of a model with a sum and a mean as losses: no single weight is right for both."""
    replica = replicas.current()
    message = (
        "compile(loss=...): losses with reduction='sum' beside losses with a mean can't be weighed for a batch "
        "that divides unevenly among the replicas; use one kind of reduction, or batch(..., drop_remainder=True). "
        "Received examples, replicas:"
    )
    tf.debugging.Assert(shares.is_even(replica), [message, shares.total, shares.num_replicas])
    return list(gradients)


def _weighing(metric: Any, rows: Sequence[tf.Tensor], weight: Callable[[], Any], factor: Any = None) -> Any:
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        del sample_weight
        values = tf.where(rows[replicas.current()] > 0, values, tf.zeros_like(values))
        values = values if factor is None else values * tf.cast(factor, values.dtype)
        return _update_weighed(update_state, values, weight())

    return update


def weighing_scalars(metric: Any, weight: Callable[[], Any]) -> Callable[..., Any]:
    """Weights a scalar that a step computes from its examples, such as its loss, by the replica's share of them."""
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        # An integer is a count, which is summed over the replicas.
        is_number = tf.as_dtype(getattr(values, "dtype", "int32")).is_floating
        if getattr(values, "shape", (0,)) != () or not is_number:
            return update_state(values, sample_weight)
        return _update_weighed(update_state, values, weight() if sample_weight is None else sample_weight)

    return update


def _without_nan(metric: Any) -> Callable[..., Any]:
    """Ignores the NaN of a replica without examples, in the loss that Keras weights by examples."""
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        return update_state(values) if sample_weight is None else _update_weighed(update_state, values, sample_weight)

    return update


def _update_weighed(update_state: Callable[..., Any], values: Any, weight: Any) -> Any:
    weight = tf.cast(weight, tf.float32)
    # Without examples a mean is NaN, and NaN times a weight of 0 is NaN.
    values = tf.where(weight > 0, values, tf.zeros_like(values))
    return update_state(values, sample_weight=weight)


def _same(tensors: Sequence[Any]) -> list[Any]:
    return [tf.identity(tensor) for tensor in tensors]


def _with_values(gradient: Any, values: tf.Tensor) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse else values
