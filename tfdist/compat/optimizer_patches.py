# SPDX-License-Identifier: Apache-2.0
"""Optimizer patches: changes of Keras' path from a replica's gradients to the update, while the step is traced.

Keras 3 reduces gradients inside `optimizer.apply`, after clipping, inside the conditional of gradient accumulation and
after the finiteness check of loss scaling. On several replicas each of these is wrong or impossible. The patches
move the reduction in front of these, so that the update is the one of a single device. They are attributes of optimizer
*instances*, and only while the step is traced: no Keras class is changed here. (`plain_loops` changes the classes, for
loops without `strategy.run`.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import (
    common_rows,
    instance_keys,
    loops,
    optimizer_variables,
    own_attributes,
    placed_layers,
    replicas,
)

NEEDS = (
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._distributed_tf_update_step",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._apply_weight_decay",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_increment_gradient_accumulators",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_reset_gradient_accumulators",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_update_step",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._clip_gradients",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._overwrite_model_variables_with_average_value",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._update_model_variables_moving_average",
    "keras:optimizers.LossScaleOptimizer._common_apply",
    "keras:optimizers.LossScaleOptimizer._tf_apply",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._use_merge_call",
)

Gradients = Sequence[Any]
Transform = Callable[[Gradients], Gradients]
# Sums, in replica context, the gradients that an optimizer is to apply: (optimizer, gradients, variables). None stays
# None.
SumGradients = Callable[[Any, Gradients, Sequence[Any]], list[Any]]
_SumUp = Callable[[Gradients, Sequence[Any]], list[Any]]

# Method that Keras calls with the clipped and summed gradients:
# update(distribution, [(gradient, variable)], learning rate).
UPDATE = "_distributed_tf_update_step"
# Method in which Keras sums the gradients of all replicas.
_SUM = "_all_reduce_sum_gradients"


@contextlib.contextmanager
def patched(
    optimizers: Iterable[Any], weigh: Transform | None = None, sum_gradients: SumGradients | None = None
) -> Iterator[None]:
    """Within this block, `apply` of these optimizers updates as one device would, from the sum over all replicas.

    Args:
      optimizers: Keras optimizers; each is restored at the end.
      weigh: called in replica context with this replica's gradients before they are summed.
      sum_gradients: sums them; `sum_over_replicas` by default.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            sum_up = functools.partial(sum_gradients, optimizer) if sum_gradients else _sum_up
            stack.enter_context(_patched(optimizer, weigh, sum_up))
        yield


class Postponed:
    """One call of `optimizer.apply` in a step, and the update that is made after the step from the sums.

    Args:
      optimizer: a Keras optimizer, which is built.
      weigh: see `patched`.

    Attributes:
      optimizer: the optimizer.
      gradients: what `apply` was given, weighed; a sparse one is summed over the replicas already. None where there is
        no gradient.
    """

    def __init__(self, optimizer: Any, weigh: Transform | None) -> None:
        self.optimizer = optimizer
        self._weigh = weigh
        self._variables: Sequence[Any] | None = None
        self.gradients: list[Any] = []

    @property
    def variables(self) -> Sequence[Any]:
        """The variable of each gradient."""
        return self._variables or optimizer_variables.trained_by(self.optimizer)

    @property
    def change(self) -> tuple[Any, str, Any]:
        """The change, for `attributes`, by which `apply` keeps the gradients."""
        return self.optimizer, "apply", self._keep

    def _keep(self, grads: Gradients, trainable_variables: Sequence[Any] | None = None) -> None:
        if self.gradients:
            raise RuntimeError(f"train_step: it calls apply of {self.optimizer.name!r} twice, which Keras' does not")
        grads, self._variables = list(grads), trainable_variables
        for gradient, variable in zip(grads, trainable_variables or (), strict=False):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)  # Not known by the gradients of some operations on rows.
        grads = placed_layers.beside(list(self._weigh(grads)) if self._weigh else grads, self.variables)
        is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in grads]
        sums = sum_over_replicas([g if sparse else None for g, sparse in zip(grads, is_sparse, strict=True)])
        self.gradients = [
            total if sparse else gradient for gradient, total, sparse in zip(grads, sums, is_sparse, strict=True)
        ]

    def update(self, strategy: tf.distribute.Strategy, sums: Gradients) -> None:
        """Makes the update on all replicas of this process, in cross-replica context, from the sums of `gradients`."""
        with attributes(_of_update(self.optimizer, list)):
            apply = _without_result(lambda: self.optimizer.apply(sums, self._variables))
            strategy.extended.call_for_each_replica(apply)


def optimizers_of(model: keras.Model) -> list[Any]:
    """The optimizer given to `compile`, and those that a subclass keeps in attributes of its own, as GANs do."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    unique = {id(value): value for value in found if isinstance(value, keras.optimizers.Optimizer)}
    for optimizer in list(unique.values()):
        for part in optimizer_variables.parts_of(optimizer)[1:]:
            unique.pop(id(part), None)
    return list(unique.values())


def sum_over_replicas(gradients: Gradients) -> list[Any]:
    """The sums over all replicas, in replica context; None stays None."""
    sums: list[Any] = [None] * len(gradients)
    # TensorFlow packs the tensors of one reduction into one tensor, of one dtype.
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients if gradient is not None):
        chosen = [index for index, each in enumerate(gradients) if each is not None and each.dtype == dtype]
        varying = [index for index in chosen if _varies(gradients[index])]
        fixed = [index for index in chosen if index not in varying]
        for indices, reduce in ((fixed, _all_reduce), (varying, _sum_varying)):
            totals = reduce([gradients[index] for index in indices]) if indices else []
            for index, total in zip(indices, totals, strict=True):
                is_common = common_rows.are_common(gradients[index])
                sums[index] = common_rows.added_up(total, _num_replicas()) if is_common else total
    return sums


def _num_replicas() -> int:
    return replicas.count(tf.distribute.get_strategy())


def sum_given(optimizer: Any, gradients: Gradients, variables: Sequence[Any]) -> list[Any]:
    """Sums gradients over all replicas as they are: a `SumGradients`."""
    del optimizer
    return _sum_up(gradients, variables)


def _sum_up(gradients: Gradients, variables: Sequence[Any]) -> list[Any]:
    return sum_over_replicas(placed_layers.beside(gradients, variables))


def _sum_varying(values: Gradients) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    if replicas.has_other_workers(context.strategy):
        with instance_keys.counted(context.strategy):
            return _all_reduce(values)
    check_can_meet()
    return context.merge_call(_concatenate, args=tuple(values))


def _all_reduce(values: Gradients) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    check_can_meet()
    if not context.strategy.extended._use_merge_call():
        # Past `empty_parts.without_terms`: gradients are weighted.
        return type(context).all_reduce(context, tf.distribute.ReduceOp.SUM, values)
    # ReplicaContext.all_reduce does this too, but gives the sum a gradient of its own. TensorFlow never
    # frees this registration, nor the graph and the strategy that it references. No code needs that gradient.
    return context.merge_call(_reduce_together, args=tuple(values))


def check_can_meet() -> None:
    """Raises RuntimeError in replica context where replicas can't wait for each other, with the remedy."""
    graph = getattr(threading.current_thread(), "graph", None)
    if graph is not None and graph is not tf.compat.v1.get_default_graph():
        raise RuntimeError(
            "train_step: optimizer.apply can't add up the replicas' gradients inside of a conditional, a loop or a "
            "tf.function within the step; call it in the step itself, with gradients that are multiplied by the "
            f"condition. Received: a call inside of one, {tf.distribute.get_strategy().num_replicas_in_sync} replicas"
        )


def _reduce_together(strategy: tf.distribute.Strategy, *values: Any) -> Sequence[Any]:
    # One device: a tensor can't be a destination.
    pairs = [(value, value.device if isinstance(value, tf.Tensor) else value) for value in values]
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)


def _concatenate(strategy: tf.distribute.Strategy, *values: Any) -> Sequence[Any]:
    """The sums of sparse gradients, without a collective."""
    del strategy
    reduction = tf.distribute.ReductionToOneDevice()
    return [reduction.reduce(tf.distribute.ReduceOp.SUM, value, value) for value in values]


def _varies(gradient: Any) -> bool:
    """Returns True if the shape of a sparse gradient may differ in each iteration of a loop.

    TensorFlow's collectives fail then, unless each iteration has its own instance keys.
    """
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return is_sparse and not gradient.indices.shape.is_fully_defined() and loops.in_loop()


@contextlib.contextmanager
def _patched(optimizer: Any, weigh: Transform | None, sum_up: _SumUp) -> Iterator[None]:
    is_whole = len(optimizer_variables.parts_of(optimizer)) == 1
    first_sum = not is_whole or clips(optimizer) or _branches(optimizer)
    changes: list[tuple[Any, str, Any]] = []
    if weigh or first_sum:
        changes.append((optimizer, "apply", _apply(optimizer, weigh, sum_up if first_sum else None)))
    with attributes([*changes, *_of_update(optimizer, list if first_sum else _summing_pairs(sum_up))]):
        yield


def _of_update(optimizer: Any, sum_pairs: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """Returns the changes by which an optimizer and its parts sum by `sum_pairs`, and branch where they can."""
    parts = optimizer_variables.parts_of(optimizer)
    branching = [(part, "_backend_apply_gradients", _branching_apply(part)) for part in parts if _branches(part)]
    return [*((part, _SUM, sum_pairs) for part in parts), *branching]


@contextlib.contextmanager
def attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within this block these objects have these attributes, of (object, name, value), of their own."""
    before: list[tuple[Any, str, bool, Any]] = []
    try:
        for target, name, value in changes:
            before.append((target, name, name in vars(target), own_attributes.of(target, name)))
            own_attributes.put(target, name, value)
        yield
    finally:
        for target, name, was_there, value in reversed(before):
            if was_there:
                own_attributes.put(target, name, value)
            else:
                own_attributes.remove(target, name)


def without_all_reduce(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Changes, for `attributes`, by which an optimizer takes gradients as they are, summed or of one replica."""
    return [(part, _SUM, list) for part in optimizer_variables.parts_of(optimizer)]


def of_strategy(optimizer: Any, strategy: tf.distribute.Strategy) -> tuple[Any, str, Any]:
    """A change, for `attributes`, by which an optimizer is one of this strategy."""
    return optimizer, "_distribution_strategy", strategy


def ema_overwrite(optimizer: Any, overwrite: Callable[[Sequence[Any]], None]) -> tuple[Any, str, Any]:
    """A change, for `attributes`, by which averages of `use_ema` overwrite variables by `overwrite(variables)`."""
    return optimizer, "_overwrite_model_variables_with_average_value", overwrite


def without_merge_call(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Changes, for `attributes`, by which `apply` of one replica does without the others: nothing is summed."""
    # The other way of loss scaling has all replicas apply together, in threads that can't meet in a conditional.
    scaling = [each for each in optimizer_variables.parts_of(optimizer) if hasattr(each, "inner_optimizer")]
    return [*without_all_reduce(optimizer), *((each, "_tf_apply", each._common_apply) for each in scaling)]


def clips(optimizer: Any) -> bool:
    """Returns True if the optimizer clips gradients; Keras would clip on each replica, before the sum."""
    return any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue))


def _branches(optimizer: Any) -> bool:
    """Returns True if the update is conditional; a conditional in replica context can't contain a merge call."""
    return bool(optimizer.gradient_accumulation_steps or (optimizer.use_ema and optimizer.ema_overwrite_frequency))


def _apply(optimizer: Any, weigh: Transform | None, sum_up: _SumUp | None) -> Callable[..., None]:
    original = optimizer.apply

    def apply(grads: Gradients, trainable_variables: Any = None) -> None:
        if tf.distribute.in_cross_replica_context():
            return original(grads, trainable_variables)
        grads = list(weigh(grads) if weigh else grads)
        if sum_up:
            grads = sum_up(grads, trainable_variables or optimizer_variables.trained_by(optimizer))
        return original(grads, trainable_variables)

    return apply


def _summing_pairs(sum_up: _SumUp) -> Callable[..., list[tuple[Any, Any]]]:
    """Keras' `_all_reduce_sum_gradients`."""

    def sum_pairs(gradients_and_variables: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(gradients_and_variables)
        if tf.distribute.in_cross_replica_context():
            return pairs
        variables = [variable for _, variable in pairs]
        return list(zip(sum_up([gradient for gradient, _ in pairs], variables), variables, strict=True))

    return sum_pairs


def _branching_apply(optimizer: Any) -> Callable[..., None]:
    """Keras' `_backend_apply_gradients` with its conditionals in cross-replica context, where they may be."""

    def backend_apply_gradients(grads: Gradients, trainable_variables: Sequence[Any]) -> None:
        def everywhere(function: Callable[..., Any], *args: Any) -> Callable[[], tf.Tensor]:
            def branch() -> tf.Tensor:
                tf.distribute.get_strategy().extended.call_for_each_replica(_without_result(function), args=args)
                return tf.constant(True)

            return branch

        def merged(strategy: tf.distribute.Strategy, grads: Gradients) -> None:
            del strategy
            _update_or_accumulate(optimizer, grads, trainable_variables, everywhere)
            _average(optimizer, everywhere)

        tf.distribute.get_replica_context().merge_call(merged, args=(list(grads),))

    return backend_apply_gradients


def _update_or_accumulate(optimizer: Any, grads: Gradients, variables: Sequence[Any], everywhere: Callable) -> None:
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        everywhere(_update, optimizer, grads, variables)()
        return
    # The accumulators of these variables: some may have been left out for want of a gradient.
    totals = optimizer_variables.sums_of(optimizer)
    sums = [totals[optimizer_variables.index_of(optimizer, variable)] for variable in variables]

    def update_from_sums(grads: Gradients) -> None:
        _update(optimizer, [(grad + total) / steps for grad, total in zip(grads, sums, strict=True)], variables)
        optimizer._backend_reset_gradient_accumulators()

    def accumulate(grads: Gradients) -> None:
        optimizer._backend_increment_gradient_accumulators(grads, sums)

    due = tf.equal((_value(optimizer_variables.iterations_of(optimizer)) + 1) % steps, 0)
    tf.cond(due, everywhere(update_from_sums, grads), everywhere(accumulate, grads))


def _update(optimizer: Any, grads: Gradients, variables: Sequence[Any]) -> None:
    grads = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)


def _average(optimizer: Any, everywhere: Callable) -> None:
    if not optimizer.use_ema:
        return
    variables = optimizer_variables.trained_by(optimizer)
    everywhere(optimizer._update_model_variables_moving_average, variables)()
    if optimizer.ema_overwrite_frequency:
        due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % optimizer.ema_overwrite_frequency, 0)
        overwrite = everywhere(optimizer._overwrite_model_variables_with_average_value, variables)
        tf.cond(due, overwrite, lambda: tf.constant(True))


def _value(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(variable)


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        function(*args)

    return tf.autograph.experimental.do_not_convert(call)
