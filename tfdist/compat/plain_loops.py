# SPDX-License-Identifier: Apache-2.0
"""Lets a loop without `strategy.run` train a model of a strategy, in its scope and outside, as on one device.

Guides on custom loops have no strategy: they call the model, a gradient tape and `optimizer.apply` directly. Each step
is then that of one device, with the first replica's copies of the variables, and its update is made on all copies of
the process. TensorFlow and Keras refuse four parts of it, none of which has a public seam:

- `optimizer.apply` outside of the scope: Keras updates in the context of the caller, not in that of its strategy;
- `optimizer.apply` in the scope: see `cross_replica_updates`;
- a `LossScaleOptimizer`: Keras has all replicas apply together, where there are none; and the scale that its first call
  is traced with would be a constant, if the call does not make the optimizer's variables in its graph;
- the gradient tape in the scope: a mirrored variable has no `handle` there, though it is read from the first replica.

Each is replaced for good where it would have raised, and for the strategies that ask for it.

Several workers would each update their own copies with gradients of their own, which neither TensorFlow nor Keras
notices outside of the scope. There `optimizer.apply` updates by the mean of the workers' gradients, as it does in
Horovod. What the strategy has reduced, and what a graph computes of that and of variables, is the same on all workers
and is taken as it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import values
from tensorflow.python.eager import backprop

from tfdist.compat import (
    cross_replica_updates,
    keras_variables,
    moved_variables,
    optimizer_variables,
    replacing,
    replicas,
)

NEEDS = (
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._distribution_strategy",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._variables",
    "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
    "keras:optimizers.LossScaleOptimizer._common_apply",
    "keras:optimizers.LossScaleOptimizer._tf_apply",
    "tensorflow.python.distribute.values:DistributedVariable._get_on_device_or_primary",
    "tensorflow.python.distribute.values:Mirrored",
    "tensorflow.python.distribute.values:PerReplica",
    "tensorflow.python.eager.backprop:_handle_or_self",
)

# An attribute of the strategies that ask for it.
_MARK = "_tfdist_trains_in_plain_loops"
_SUM = "_tfdist_sums_in_plain_loops"
# An attribute of tensors that are the same on all workers.
_COMMON = "_tfdist_is_common"
# Operations whose results are so, whatever their inputs are; and those that a program may mix with them.
_REDUCTIONS = frozenset({"CollectiveReduceV2", "CollectiveGatherV2"})
_NEUTRAL = frozenset({"Const", "ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
# Set in a thread while an `apply` that was checked calls another one, as for loss scaling.
_checked = threading.local()


def allow(
    strategy: tf.distribute.Strategy,
    sum_over_workers: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
) -> None:
    """Makes loops without `run` train this strategy's models.

    Args:
      strategy: the strategy.
      sum_over_workers: adds up tensors of all workers, each of which calls it; None if there are no others.
    """
    vars(strategy)[_MARK] = True
    vars(strategy)[_SUM] = sum_over_workers
    cross_replica_updates.allow()
    for owner in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        replacing.once(owner, "apply", _applying)
    replacing.once(keras.optimizers.LossScaleOptimizer, "_tf_apply", _applying_if_finite)
    replacing.once(keras.optimizers.LossScaleOptimizer, "scale_loss", _scaling)
    replacing.once(keras.optimizers.LossScaleOptimizer, "build", _building)
    replacing.once(backprop, "_handle_or_self", _handle_or_self)


def mark_common(value: Any) -> Any:
    """Notes that tensors are the same on all workers, such as what `strategy.reduce` returns; returns them."""
    for leaf in tf.nest.flatten(value, expand_composites=True):
        if isinstance(leaf, tf.Tensor):
            setattr(leaf, _COMMON, True)
    return value


def take_over(strategy: Any, optimizer: Any) -> None:
    """Makes an optimizer that was made outside of the scope one of the strategy, unless it has slots already.

    Replicas would each count its iterations, and slots can't be made for variables of another strategy.
    """
    for each in optimizer_variables.parts_of(optimizer):
        if each.built or each._distribution_strategy is not replicas.default_strategy():
            continue
        for variable in each._variables:
            moved_variables.move(strategy, variable)
        # Past Keras' own __setattr__, which tracks values.
        object.__setattr__(each, "_distribution_strategy", strategy)


def _is_allowed(strategy: Any) -> bool:
    return getattr(strategy, _MARK, False) is True


# optimizer.apply


def _applying(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables if trainable_variables is None else list(trainable_variables)
        here = _strategy_of_replica()
        if here is not None and getattr(_checked, "by", None) is not here:
            take_over(here, self)
            # In the context of another strategy its slots, and its count of updates, would be written by all replicas.
            own = [] if self._distribution_strategy is here else self.variables
            moved_variables.check_scope(here, [*(variables or optimizer_variables.trained_by(self)), *own])
            return original(self, grads, variables)
        own = getattr(self, "_distribution_strategy", None)
        # An optimizer that was made outside of the scope updates the variables of a strategy, too.
        strategy = next(filter(_is_allowed, [own, *map(_strategy_of, variables or ())]), None)
        if strategy is None or getattr(_checked, "by", None) is strategy:
            return original(self, grads, variables)
        grads = _same_on_all(self, strategy, list(grads))
        take_over(strategy, self)
        if self._distribution_strategy is not strategy:
            return original(self, grads, variables)
        with checked(strategy):
            if not self.built and variables is not None:
                with tf.init_scope(), strategy.scope():
                    self.build(variables)
            return original(self, grads, variables)

    return apply


@contextlib.contextmanager
def checked(strategy: Any) -> Iterator[None]:
    """Within the block, in the strategy's scope, `optimizer.apply` of this thread is not checked again."""
    _checked.by = strategy
    is_current = tf.distribute.get_strategy() is strategy
    try:
        with contextlib.nullcontext() if is_current else strategy.scope():
            yield
    finally:
        _checked.by = None


def _strategy_of(variable: Any) -> Any:
    value = keras_variables.tf_variable(variable)
    # A single copy, which a replica may train alone, has the attribute too.
    return keras_variables.strategy_of(value) if isinstance(value, values.DistributedVariable) else None


def _strategy_of_replica() -> Any:
    """The strategy, of those that ask for it, in whose replica context this is; or None."""
    strategy = tf.distribute.get_strategy()
    is_replica = _is_allowed(strategy) and not tf.distribute.in_cross_replica_context()
    return strategy if is_replica else None


def _is_on_replica_of(strategy: Any) -> bool:
    return tf.distribute.get_strategy() is strategy and not tf.distribute.in_cross_replica_context()


def _same_on_all(optimizer: Any, strategy: Any, grads: list[Any]) -> list[Any]:
    """The gradients, with the mean over the workers in place of each that a worker has computed for itself.

    Raises:
      RuntimeError: They are those of each replica, by which each copy of a variable would be updated otherwise.
    """
    if any(isinstance(grad, values.PerReplica) for grad in grads):
        raise RuntimeError(
            "optimizer.apply, called outside of strategy.run with the gradients of each replica, would let the copies "
            "of the model drift apart. Call it in a step that strategy.run is given, or with gradients that "
            "strategy.reduce has returned. "
            f"Received: optimizer {optimizer.name!r}, {strategy.num_replicas_in_sync} replicas"
        )
    own = [index for index, grad in enumerate(grads) if not _is_common(grad)]
    sum_over_workers = vars(strategy)[_SUM]
    if not own or sum_over_workers is None or not replicas.has_other_workers(strategy):
        return grads
    # Rows that a worker's batch does not touch are zeros to the others.
    sums = sum_over_workers([tf.convert_to_tensor(grads[index]) for index in own])
    for index, total in zip(own, sums, strict=True):
        grads[index] = mark_common(total / tf.cast(replicas.worker_count(strategy), total.dtype))
    return grads


def _is_common(gradient: Any) -> bool:
    """Returns True if a gradient was reduced over the workers, or computed from reduced values and variables alone."""
    if gradient is None or isinstance(gradient, values.Mirrored):
        return True
    seen, waiting, reduced = set[Any](), tf.nest.flatten(gradient, expand_composites=True), False
    while waiting:
        each = waiting.pop()
        outer = _captured_as(each)
        if outer is not None:
            waiting.append(outer)
        elif hasattr(each, _COMMON):
            reduced = True
        elif not tf.is_symbolic_tensor(each):
            return False
        elif each.op.type in _REDUCTIONS:
            reduced = True
        elif each.op.type not in _NEUTRAL and each.op not in seen:
            if each.op.op_def.is_stateful or not each.op.inputs:
                return False
            seen.add(each.op)
            waiting.extend(each.op.inputs)
    # A graph of constants alone may have a worker's own data among them.
    return reduced


def _captured_as(tensor: Any) -> Any:
    """The tensor of an outer graph that this one stands for; None if it stands for itself."""
    is_captured = tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder"
    captures = getattr(tensor.graph, "captures", ()) if is_captured else ()
    return next((outer for outer, inner in captures if inner is tensor), None)


# Loss scaling


def _applying_if_finite(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if tf.distribute.in_cross_replica_context() and _is_allowed(tf.distribute.get_strategy()):
            return self._common_apply(grads, trainable_variables)
        return original(self, grads, trainable_variables)

    return apply


# An attribute of an optimizer: its own variables, made before those that need the model's.
_EARLY = "_tfdist_early_variables"


def _scaling(original: Any) -> Any:
    def scale_loss(self: Any, loss: Any) -> Any:
        strategy = getattr(self, "_distribution_strategy", None)
        if self.built or tf.executing_eagerly() or not _is_allowed(strategy) or _is_on_replica_of(strategy):
            return original(self, loss)
        return loss * tf.cast(_early_variables(self, strategy)["dynamic_scale"], loss.dtype)

    return scale_loss


def _early_variables(optimizer: Any, strategy: Any) -> dict[str, Any]:
    """The optimizer's own variables, of which `build` makes no others."""
    if _EARLY not in vars(optimizer):
        initializers = {"step_counter": "zeros", "dynamic_scale": keras.initializers.Constant(optimizer.initial_scale)}
        dtypes = {"step_counter": "int", "dynamic_scale": "float32"}
        with tf.init_scope(), strategy.scope():
            made = {
                name: optimizer.add_variable((), initializer, dtypes[name], aggregation="none", name=name)
                for name, initializer in initializers.items()
            }
        object.__setattr__(optimizer, _EARLY, made)
    return vars(optimizer)[_EARLY]


def _building(original: Any) -> Any:
    def build(self: Any, var_list: Any) -> Any:
        made = vars(self).get(_EARLY)
        if self.built or not made:
            return original(self, var_list)
        object.__setattr__(self, "add_variable", lambda *args, name, **options: made[name])
        try:
            return original(self, var_list)
        finally:
            object.__delattr__(self, "add_variable")

    return build


# The gradient tape


def _handle_or_self(original: Any) -> Any:
    def handle_or_self(x: Any) -> Any:
        variable = keras_variables.tf_variable(x) if isinstance(x, keras.Variable) else x
        # Within `extended.update` there is a replica, though no replica context.
        is_updated = replicas.is_updating()
        is_outside = tf.distribute.in_cross_replica_context() and not is_updated
        is_variable = isinstance(variable, values.DistributedVariable)
        if is_variable and is_outside and _is_allowed(keras_variables.strategy_of(variable)):
            return variable._get_on_device_or_primary().handle
        return original(x)

    return handle_or_self
