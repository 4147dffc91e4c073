# SPDX-License-Identifier: Apache-2.0
"""Tells losses that are sums over the examples from those that are means, and notices means of fewer numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log
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
        facts, applies = replicas.facts_of(strategy), has_own_loss(step)
        before, facts.counts_as_one_replica = facts.counts_as_one_replica, applies
        try:
            yield applies
        finally:
            facts.counts_as_one_replica = before


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
        weigh = _if_even if has_both_kinds(self.model) else _weighed
        return functools.partial(weigh, self.shares)

    @property
    def unit(self) -> int:
        """The factor from a replica's gradient to that of a device which has the replica's examples alone."""
        return 1 if self.has_own_loss or self._are_all_sums() else self.num_replicas

    def of_losses(self) -> list[tuple[Any, str, Any]]:
        """Returns patches for `optimizers.patched_attributes` that weight losses and their metrics as on one device."""
        shares, divisor = self.shares, 1 if self.has_own_loss else self.num_replicas
        if shares is None:
            return _patches(self.model, self.num_replicas, divisor, self.has_own_loss, self._share)
        # Keras multiplies a sum by the number of replicas, so the mean over those that count is the sum over all.
        holders = None if shares.holders is None else tf.cast(shares.holders, tf.float64)
        # A replica whose copy of the batch does not count has no part in the mean; one without examples has.
        counts = lambda: tf.cast(shares.holds[replicas.current()], tf.float64) if shares.holds else 1.0  # noqa: E731
        rows = lambda: shares.rows[replicas.current()]  # noqa: E731
        given = self._share, rows, tf.cast(shares.total, tf.float64), holders, counts
        return _patches(self.model, self.num_replicas, divisor, self.has_own_loss, *given)

    def _are_all_sums(self) -> bool:
        return all(_are_sums(self.model) or [False])

    def _share(self) -> Any:
        return self.shares.of_this_replica() if self.shares else 1 / self.num_replicas


def _are_sums(model: keras.Model) -> list[bool]:
    return [is_sum(loss) for loss in models.compiled_losses(model)]


def has_both_kinds(model: keras.Model) -> bool:
    """Returns True if some losses of the model are sums over the examples, and others are means."""
    return len(set(_are_sums(model))) > 1


def trackers_of_sums(model: keras.Model, is_total_known: bool = True) -> list[Any]:
    """Returns the metrics of losses that are sums: a replica without examples adds a sum of 0 to their means.

    Args:
      model: the model.
      is_total_known: False if the whole loss is weighted by the replica's examples, as the number of all is not known.
    """
    are_sums, single = _are_sums(model), models.trackers_of_single(model)
    whole = [models.tracker_of(model)] if is_total_known and are_sums and all(are_sums) else []
    return whole + [metric for metric, is_one in zip(single, are_sums, strict=False) if is_one]


def _patches(
    model: keras.Model,
    num_replicas: int,
    divisor: int,
    has_own_loss: bool,
    share: Callable[[], Any],
    rows: Callable[[], tf.Tensor] | None = None,
    total: Any = None,
    holders: Any = None,
    counts: Callable[[], Any] = lambda: 1.0,
    by_examples: CountedByExamples | None = None,
) -> list[tuple[Any, str, Any]]:
    """Returns patches by which the losses of a replica, and metrics of them, count as on one device.

    Keras weights each replica's loss by its examples, which is wrong for sums. It doesn't weight the losses of single
    outputs, nor numbers that a step, or a function given as a metric, computes itself, and divides penalties by the
    number of replicas.

    Args:
      model: the model.
      num_replicas: largest number of replicas.
      divisor: Keras' divisor of each replica's loss.
      has_own_loss: True if the step computes losses of its own.
      share: returns the replica's share of the batch; where it is not known, all parts count alike.
      rows: returns the replica's number of examples; None if there are as many on each replica, or it is not known.
      total: number of examples in all parts together, if known.
      holders: number of replicas that count; all by default.
      counts: returns 1 for a replica that counts, else 0.
      by_examples: weighs numbers in place of `share`.
    """
    sums = [metric for metric in model.metrics if has_own_loss and type(metric) is keras.metrics.Sum]
    weight_of = by_examples.weight_of if by_examples else lambda metric: lambda is_asked: share() if is_asked else None
    weighing = {
        id(metric): (metric, functools.partial(models.update_weighing, metric.update_state, weight_of(metric)))
        for metric in sums
    }
    are_sums, changes = _are_sums(model), []
    if rows is not None and are_sums:
        holders = num_replicas if holders is None else holders
        # The mean over replicas of the scaled sums is the total. Keras has multiplied by `divisor` already.
        of_sum = (lambda: counts() / holders) if total is not None else None, holders / divisor
        tracker, is_all = models.tracker_of(model), all(are_sums)
        whole = (lambda: total * counts() / holders) if is_all and total is not None else None
        # One for each loss, or none for a single one.
        pairs = zip(models.trackers_of_single(model), are_sums, strict=False)
        single: list[tuple[Any, ...]] = [
            (metric, *(of_sum if is_one else (functools.partial(weight_of(metric), True), 1.0)))
            for metric, is_one in pairs
        ]
        if not has_own_loss:
            single.append((tracker, whole, of_sum[1] if is_all else 1.0))
        weighing |= {id(metric): (metric, _weighing(metric, rows, *how)) for metric, *how in single}
    if num_replicas > 1 and (rows is not None or num_replicas != divisor):
        # Penalties are means over the replica's examples.
        changes = [models.multiplied_losses(model, lambda: share() * divisor)] if all(are_sums or [False]) else []
    means = [mean for mean in models.means_in(model.metrics) if num_replicas > 1 and id(mean) not in weighing]
    changes += [models.weighed_numbers(mean, weight_of(mean)) for mean in means]
    return [*((metric, "update_state", update) for metric, update in weighing.values()), *changes]


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
        condition,
        lambda: [*map(tf.identity, present)],
        lambda: [contribution.times(each, otherwise) for each in present],
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


def _weighing(metric: Any, rows: Callable[[], Any], weight: Callable[[], Any] | None, factor: Any) -> Any:
    """Weights a loss by `weight`, or as Keras does; losses of no examples, which may be NaN, count nothing."""
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        values = tf.where(rows() > 0, values, tf.zeros_like(values))
        values = values if isinstance(factor, float) and factor == 1.0 else values * tf.cast(factor, values.dtype)
        sample_weight = weight() if weight else sample_weight
        return (
            update_state(values)
            if sample_weight is None
            else models.update_weighed(update_state, values, sample_weight)
        )

    return update


def _with_values(gradient: Any, values: tf.Tensor) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if is_sparse else values


def share_of_batch(batch: Any, batch_rows: tf.Tensor | None, num_replicas: int) -> tf.Tensor | float:
    """Returns the part of the global batch, 0 to 1, that a replica has.

    Args:
      batch: the replica's part.
      batch_rows: number of examples in all parts together; where it is not known, all parts with examples count alike.
      num_replicas: largest number of replicas.
    """
    rows = splitting.rows(batch)
    # In a graph parts have a known size only where all have the same; outside every size is known.
    is_even = bool(splitting.static_size(batch)) and not tf.executing_eagerly()
    if rows is None or is_even:
        return 1 / num_replicas
    if batch_rows is None:
        return tf.where(rows > 0, tf.constant(1 / num_replicas, tf.float64), 0.0)
    return rows / tf.maximum(batch_rows, 1)


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

    def factor(self, batch: Any, batch_rows: tf.Tensor | None, may_be_empty: bool) -> tf.Tensor | float:
        """Returns the factor by which a gradient of this replica alone counts as that of the global batch.

        Args:
          batch: the replica's part.
          batch_rows: number of examples in all parts together, if known.
          may_be_empty: True if the part may have no examples.
        """
        if not self.are_sums:
            return share_of_batch(batch, batch_rows, self.num_replicas) * self.num_replicas * self.divisor
        rows = splitting.rows(batch)
        has_examples = 1.0 if rows is None or not may_be_empty else tf.cast(rows > 0, tf.float32)
        return float(self.num_replicas) * has_examples

    def patches(
        self,
        batch: Any,
        batch_rows: tf.Tensor | None,
        has_own_loss: bool,
        by_examples: CountedByExamples | None = None,
    ) -> list[tuple[Any, str, Any]]:
        """Returns patches by which losses, and metrics of them, count as on one device.

        Args:
          batch: the replica's part.
          batch_rows: number of examples in all parts together, if known.
          has_own_loss: True if the step computes losses of its own.
          by_examples: counts numbers where `batch_rows` is not known.
        """
        count, rows = self.num_replicas, splitting.rows(batch)
        share = functools.partial(share_of_batch, batch, batch_rows, count)
        known = share, None if rows is None else lambda: rows
        total = None if batch_rows is None else tf.cast(batch_rows, tf.float64)
        has_own_loss &= count > 1
        return _patches(self.model, count, self.divisor, has_own_loss, *known, total, by_examples=by_examples)


class CountedByExamples:
    """Metrics that count a replica's number by its examples, where those of the whole batch are not known.

    At the update their counts are divided by the examples of all contributions.

    Args:
      batch: the replica's part.
      num_replicas: largest number of replicas.
      left_out: ids of metrics that are given numbers and values alike, so that they can't be divided.
    """

    def __init__(self, batch: Any, num_replicas: int, left_out: Container[int]) -> None:
        self._batch = batch
        self._num_replicas = num_replicas
        self._left_out = left_out
        # By id: a metric, and for its updates True if they were of such numbers.
        self._updates: dict[int, tuple[Any, set[bool]]] = {}

    def weight_of(self, metric: Any) -> Callable[[bool], Any]:
        """Returns the weight of a metric's updates; see `models.weighed_numbers`."""

        def weight(is_asked: bool) -> Any:
            if id(metric) in self._left_out:
                return share_of_batch(self._batch, None, self._num_replicas) if is_asked else None
            self._updates.setdefault(id(metric), (metric, set()))[1].add(is_asked)
            return splitting.rows(self._batch) if is_asked else None

        return weight

    def mixed(self) -> list[Any]:
        """Returns the metrics that must be left out, once the step was traced."""
        return [metric for metric, kinds in self._updates.values() if len(kinds) > 1]

    def variables(self) -> set[int]:
        """Returns the ids of the variables whose counts are to be divided, once the step was traced."""
        metrics = [metric for metric, kinds in self._updates.values() if True in kinds]
        # Those of `Mean`, or of `Sum`. What a subclass counts besides is a sum.
        found = [getattr(metric, name, None) for metric in metrics for name in ("total", "count")]
        return {id(variable) for variable in found if variable is not None}
