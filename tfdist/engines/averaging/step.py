# SPDX-License-Identifier: Apache-2.0
"""A Keras train step that each replica makes alone: it updates its own copies of all variables, and nobody else's.

The user's `train_step` runs as it is, once for each replica of this worker, all in one graph. Within it

- `merge_call`, in which replicas would meet, calls its function for this replica alone;
- `all_reduce` gives what it would give if all replicas had this one's value;
- a gradient counts as if it was that of the global batch: times the number of replicas, if Keras has divided the
  loss by it, and times this replica's share of the batch where that is uneven. So the mean of what all replicas come
  to in one step of SGD is what synchronous SGD comes to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import flat_layers, optimizer_patches, optimizer_variables, replica_writes, replicas
from tfdist.data import splitting
from tfdist.data.shares import Part
from tfdist.step import contribution, copies, empty_parts, global_losses, one_replica
from tfdist.step.replica_losses import ReplicaLosses


def step_alone(strategy: Any, step: Callable[..., Any], parts: Sequence[Part]) -> list[Any]:
    """Makes a step on each replica of this worker; in cross-replica context, in a graph or eagerly.

    Args:
      strategy: the strategy.
      step: a model's bound `train_step`, whose optimizers were built.
      parts: what each of its replicas trains on.

    Returns:
      What each step returns.

    Raises:
      ValueError: an optimizer was not built, or the losses are of two kinds.
      NotImplementedError: the step needs the other replicas.
    """
    model: keras.Model = getattr(step, "__self__")  # noqa: B009, Keras' wrapper has it too
    batches, results = [part.batch for part in parts], []
    may_be_empty = strategy.num_replicas_in_sync > 1 and empty_parts.may_occur(batches)
    if may_be_empty:
        batches = empty_parts.filled_on_devices(dict(zip(strategy.extended.worker_devices, batches, strict=True)))
    with written_alone(_variables(model)):
        for index, part in enumerate(parts):
            with tf.device(strategy.extended.worker_devices[index]), context(strategy, index):
                results.append(_step(strategy, step, model, part, index, batches[index], may_be_empty))
    return results


def _step(
    strategy: Any,
    step: Callable[..., Any],
    model: keras.Model,
    part: Part,
    index: int,
    batch: Any,
    may_be_empty: bool,
) -> Any:
    count = strategy.num_replicas_in_sync
    with global_losses.counted_as_one(strategy, step) as has_own_loss:
        divisor = 1 if has_own_loss else count
        losses = ReplicaLosses(model, count, divisor)
        factor = float(count) if losses.are_sums else share(part, count) * count * divisor
        rows = splitting.rows(part.batch)
        if losses.are_sums and may_be_empty and rows is not None:
            factor *= tf.cast(rows > 0, tf.float32)
        changed = losses.trackers(part.batch, part.total)
        for optimizer in optimizer_patches.optimizers_of(model):
            changed += changes(optimizer, factor)
        with optimizer_patches.attributes(changed), _keeping(losses, part if may_be_empty else None, index):
            return step(batch)


def share(part: Part, num_replicas: int) -> tf.Tensor | float:
    """The part of the global batch, 0 to 1, that a replica has; the same for all where nobody knows."""
    rows = splitting.rows(part.batch)
    # In a graph parts have a known size only where all have the same; outside every size is known.
    is_even = bool(splitting.static_size(part.batch)) and not tf.executing_eagerly()
    if part.total is None or rows is None or is_even:
        return 1 / num_replicas
    return tf.cast(rows / tf.maximum(part.total, 1), tf.float32)


def changes(optimizer: Any, factor: tf.Tensor | float) -> list[tuple[Any, str, Any]]:
    """Returns patches by which `optimizer.apply`, called on a replica, updates its copies of the variables alone."""
    parts = optimizer_variables.parts_of(optimizer)
    return [
        (optimizer, "apply", _scaled(optimizer, factor)),
        # Keras does this by the strategy, past the replica's context.
        *(optimizer_patches.ema_overwrite(part, _overwriting(part)) for part in parts),
        *optimizer_patches.without_merge_call(optimizer),
    ]


def _scaled(optimizer: Any, factor: tf.Tensor | float) -> Callable[..., Any]:
    apply = optimizer.apply

    def scaled(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        if not optimizer.built:
            raise ValueError(
                f"policies: the optimizer {optimizer.name!r} must have its variables before a step is traced; call "
                "optimizer.build(variables) after the model is built. Received: an optimizer that was not built"
            )
        return apply([g if g is None else contribution.times(g, factor) for g in grads], trainable_variables)

    return scaled


def _overwriting(optimizer: Any) -> Callable[[Sequence[Any]], None]:
    def overwrite(trainable_variables: Sequence[Any]) -> None:
        for variable, average in zip(trainable_variables, optimizer_variables.averages_of(optimizer), strict=True):
            variable.assign(tf.convert_to_tensor(average))

    return overwrite


def context(strategy: Any, index: int) -> one_replica.OneReplica:
    """The context of one of this worker's replicas, which meets no other."""
    # Within the context the strategy may say that it is one replica.
    return one_replica.OneReplica(
        strategy, replicas.in_sync_group(strategy, index), replicas.count(strategy), is_alone=True
    )


@contextlib.contextmanager
def written_alone(variables: Iterable[Any]) -> Iterator[None]:
    """Within this block, what a replica assigns goes to its own copy."""
    mirrored = [getattr(variable, "value", variable) for variable in variables]
    changed = [
        variable
        for variable in mirrored
        if hasattr(variable, "values") and variable.synchronization != tf.VariableSynchronization.ON_READ
    ]
    with replica_writes.aggregated(changed, tf.VariableAggregation.NONE):
        yield


def _variables(model: keras.Model) -> list[Any]:
    """Returns the variables that a train step may write."""
    optimizers = [each for each in optimizer_patches.optimizers_of(model) if each.built]
    trained = [variable for each in optimizers for variable in optimizer_variables.trained_by(each)]
    return [*one_replica.variables_of(model), *trained]


@contextlib.contextmanager
def _keeping(losses: ReplicaLosses, part: Part | None, index: int) -> Iterator[None]:
    """Restores metrics and statistics after a step without examples; None is a part that has some."""
    if part is None:
        yield
        return
    counted = empty_parts.counted_by(losses.model, losses.trackers_of_sums(part.total is not None))
    variables = [*flat_layers.statistics_of(losses.model), *counted]
    kept = empty_parts.Kept(copies.copies_of(variable)[index] for variable in variables)
    yield
    kept.restore_unless(splitting.rows(part.batch))
