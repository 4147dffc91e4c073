# SPDX-License-Identifier: Apache-2.0
"""Tells losses that are sums over the examples from those that are means, and notices means of fewer numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log
from tfdist.compat import patching
from tfdist.compat.keras import models
from tfdist.compat.tensorflow import replicas
from tfdist.passes import splitting
from tfdist.passes.shares import Shares
from tfdist.step import contribution, rehearsal
from tfdist.step.step import Step

# Losses that a line was written for; the step may be traced several times.
_noticed: weakref.WeakSet[Any] = weakref.WeakSet()


def is_sum(loss: Any) -> bool:
    """Returns True if a loss is a sum over the examples, and not a mean."""
    return getattr(loss, "reduction", "mean") in ("sum", "none", None)


def noticed(model: Any, num_replicas: int) -> list[tuple[Any, str, Any]]:
    """Returns patches by which a line is written for a loss that is the mean of fewer numbers than examples.

    The means of the replicas are weighted by their examples, which is not the mean of all those numbers.

    Args:
      model: the model.
      num_replicas: replicas that share a batch.
    """
    means = [loss for loss in models.compiled_losses(model) if hasattr(loss, "call") and not is_sum(loss)]
    return [(loss, "call", _noticing(loss)) for loss in means if num_replicas > 1 and loss not in _noticed]


def _noticing(loss: Any) -> Callable[..., Any]:
    call = loss.call

    def noticing(y_true: Any, y_pred: Any) -> Any:
        found = call(y_true, y_pred)
        if loss not in _noticed and _has_fewer(found, y_true, y_pred):
            _noticed.add(loss)
            _log.say(
                f"the loss {getattr(loss, 'name', None) or type(loss).__name__!r} leaves examples out, or has "
                "fewer numbers than examples: it is the mean of the replicas' means, and not that of one device; "
                "return 0 for those examples, or use sample_weight"
            )
        return found

    return noticing


def _has_fewer(found: Any, *given: Any) -> bool:
    """Returns True if a loss has fewer numbers than examples, as far as is known while it is traced."""
    if not isinstance(found, tf.Tensor):
        return False
    if found.shape.rank and found.shape[0] is not None:
        rows = {each.shape[0] for each in given if isinstance(each, tf.Tensor) and each.shape.rank}
        return bool(rows) and found.shape[0] not in rows
    return tf.is_symbolic_tensor(found) and _masks(found.op, {each.op for each in given if tf.is_symbolic_tensor(each)})


def _masks(operation: Any, sources: set[Any]) -> bool:
    """Returns True if an operation depends on the places where a mask is true, as those of `tf.boolean_mask`."""
    pending, seen = [operation], {*sources, operation}
    while pending:
        operation = pending.pop()
        if operation.type == "Where":
            return True
        inputs = {tensor.op for tensor in operation.inputs} - seen
        pending += inputs
        seen |= inputs
    return False


# Scaling of the losses of a user's own step, so that several replicas train as one device.
#
# The loss of a batch is a mean over its examples, so several replicas' gradients are averaged. Keras divides the losses
# that it computes itself by `num_replicas_in_sync`, and sums gradients. A loss that a step computes with
# `tf.reduce_mean` is not divided. Under the stock strategies its gradients are too large by the number of replicas.
#
# Within `counted_as_one`, `strategy.num_replicas_in_sync` is 1 in replica context. So neither Keras nor
# `tf.nn.compute_average_loss` divides, and every loss of the step is the mean over the replica's own examples. The
# gradients are divided instead.


# Attribute of strategies: True while `num_replicas_in_sync` is 1 on a replica.
FLAG = "counts_as_one_replica"
# One trace at a time sets it, whatever engine traces: two threads may fit two models.
_TRACING = threading.RLock()
_STEPS = ("train_step", "test_step")


def has_own_loss(step: Step) -> bool:
    """Returns True if a Keras step may have a loss that Keras does not divide by the number of replicas.

    A loss with `reduction="sum"` is not divided on purpose: the step of such a model is left as it is.

    Args:
      step: of a model.
    """
    model = step.model
    if model is None or any(is_sum(loss) for loss in models.compiled_losses(model)):
        return False
    if not models.compiled_losses(model) or any(_adds_losses(type(layer)) for layer in models.layers_of(model)):
        # Keras divides losses of `add_loss` once, and a Keras loss that a layer computes for `add_loss` a second time.
        return True
    names = (*_STEPS, "compute_loss")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names):
        return True
    # An instance may have a step of its own.
    losses = models.compiled_losses(model)
    return any(name in vars(model) for name in names) or any(_is_of_users_code(loss) for loss in losses)


@contextlib.contextmanager
def counted_as_one(strategy: Any, step: Step) -> Iterator[bool]:
    """Within this block, the losses of `step` are means over a replica's own examples, if it has its own loss.

    Yields:
      True if it has its own loss; then the gradients must be divided by the number of replicas.
    """
    with _TRACING:
        before, applies = getattr(strategy, FLAG, False), has_own_loss(step)
        patching.put(strategy, FLAG, applies)
        try:
            yield applies
        finally:
            patching.put(strategy, FLAG, before)


@functools.cache
def _adds_losses(kind: type) -> bool:
    """Returns True if a user's layer class calls `add_loss`."""
    if rehearsal.is_of_keras(kind):
        return False
    functions = [value for base in kind.__mro__ for value in vars(base).values() if _is_of_a_user(base, value)]
    return any("add_loss" in rehearsal.names_used_by(function) for function in functions)


def _is_of_a_user(base: type, value: Any) -> bool:
    return base.__module__.split(".")[0] not in ("keras", "tensorflow", "builtins") and callable(value)


def _is_of_users_code(loss: Any) -> bool:
    """Returns True if the user's code computes a loss. It may be one number per batch, which Keras doesn't divide."""
    if not isinstance(loss, keras.losses.Loss):
        return False
    return not rehearsal.is_all_of_keras(loss, getattr(loss, "fn", None))


# Weights of each replica's gradients and losses, by which their sum is the gradient or loss of the global batch.
#
# A mean over a replica's examples is weighted by the replica's share of the batch; a sum is not weighted. Keras
# divides
# its own means by the number of replicas, except within `counted_as_one`.


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


# Patches a step of one replica so that its losses count as on one device, where no reduction follows in the step.
#
# Keras weights the loss of a replica by its examples, and divides losses and penalties by the number of replicas. Both
# are wrong for losses that are sums over the examples.


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
        return [(metric, "update_state", _weighing_replica(metric, scale, weight, rows)) for metric, weight in weights]

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
        of_scalars = [metric for metric in self.model.metrics if type(metric) in OF_SCALARS]
        return [(each, "update_state", weighing_scalars(each, lambda: share)) for each in of_scalars]

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


def _weighing_replica(metric: Any, scale: float, weight: Any, rows: tf.Tensor) -> Callable[..., Any]:
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        # Losses that layers add are usually means, which are NaN if there are no examples.
        values = tf.where(rows > 0, values, tf.zeros_like(values))
        values = values if scale == 1.0 else values * tf.cast(scale, values.dtype)
        return update_state(values, sample_weight=sample_weight if weight is None else tf.cast(weight, tf.float32))

    return update
