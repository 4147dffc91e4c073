# SPDX-License-Identifier: Apache-2.0
"""Keras' optimizers: sums of the gradients that they are given, their variables, and rows that replicas look up alike.

Keras 3 reduces gradients inside `optimizer.apply`, after clipping, inside the conditional of gradient accumulation and
after the finiteness check of loss scaling. On several replicas each of these is wrong or impossible. So gradients are
summed before, and `step/one_replica` has each replica apply the sum as a single device, without a reduction. Changes
are attributes of optimizer *instances*, and only while a step is traced: no Keras class is changed here. (`scope`
changes the classes, for loops without `strategy.run`.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import placement
from tfdist.compat.tensorflow import graphs, replicas

NEEDS = (
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients, _distributed_tf_update_step",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients, _backend_update_step",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._accumulated_gradients, _iterations, _learning_rate",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._model_variables_moving_average, _trainable_variables",
    "keras.src.optimizers.base_optimizer:BaseOptimizer._trainable_variables_indices, _var_key",
    "keras:optimizers.LossScaleOptimizer._common_apply, _tf_apply",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._use_merge_call",
)


Gradients = Sequence[Any]
# Function that changes gradients, from (gradients, optimizer, variables); None stays None.
Transform = Callable[[Gradients, Any, Sequence[Any]], Gradients]
# Sums, in replica context, the gradients that an optimizer is to apply: (optimizer, gradients, variables). None stays
# None.
SumGradients = Callable[[Any, Gradients, Sequence[Any]], list[Any]]

# Method that Keras calls with the clipped and summed gradients:
# update(distribution, [(gradient, variable)], learning rate).
UPDATE = "_distributed_tf_update_step"
# Method in which Keras sums the gradients of all replicas.
_SUM = "_all_reduce_sum_gradients"


def optimizers_of(model: keras.Model) -> list[Any]:
    """The optimizer given to `compile`, and those that a subclass keeps in attributes of its own, as GANs do.

    They may be in lists or dicts, or be those of models in it that are compiled, too.
    """
    found = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [getattr(value, "optimizer", None)] if isinstance(value, keras.Model) else []
    unique = {id(value): value for value in found if isinstance(value, keras.optimizers.Optimizer)}
    for optimizer in list(unique.values()):
        for part in parts_of(optimizer)[1:]:
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
                is_common = are_common_rows(gradients[index])
                sums[index] = added_up_rows(total, replicas.count(tf.distribute.get_strategy())) if is_common else total
    return sums


def sum_dense_by(
    sum_dense: Callable[[Sequence[tf.Tensor], Sequence[Any]], Sequence[tf.Tensor]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> list[Any]:
    """Sums dense gradients by a function of them and their variables, and rows as they are; None stays None.

    In replica context, or in cross-replica context if all gradients are dense.
    """
    if tf.distribute.get_replica_context() is not None:
        check_can_meet()
    dense = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
    sums = sum_over_replicas([None if i in dense else g for i, g in enumerate(gradients)])
    for index in dense:
        # Not known by the gradients of some operations on rows.
        gradients[index].set_shape(variables[index].shape)
    totals = sum_dense([gradients[index] for index in dense], [variables[index] for index in dense])
    for index, total in zip(dense, totals, strict=True):
        sums[index] = total
    return sums


def sum_given(optimizer: Any, gradients: Gradients, variables: Sequence[Any]) -> list[Any]:
    """Sums gradients over all replicas as they are: a `SumGradients`."""
    del optimizer
    return sum_over_replicas(placement.beside(gradients, variables))


def _sum_varying(values: Gradients) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    if replicas.has_other_workers(context.strategy):
        with replicas.counted_keys(context.strategy):
            return _all_reduce(values)
    check_can_meet()
    return context.merge_call(_concatenate, args=tuple(values))


def _all_reduce(values: Gradients) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    check_can_meet()
    if not context.strategy.extended._use_merge_call():
        # Past `replicas.without_terms`: gradients are weighted.
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
            f"condition. Received: a call inside of one, {replicas.count(tf.distribute.get_strategy())} replicas"
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
    return is_sparse and not gradient.indices.shape.is_fully_defined() and graphs.in_branch_or_loop()


@contextlib.contextmanager
def patched_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within this block these objects have these attributes, of (object, name, value), of their own."""
    with contextlib.ExitStack() as restoring:
        for target, name, value in changes:
            if name in vars(target):
                restoring.callback(patching.put, target, name, vars(target)[name])
            else:
                restoring.callback(patching.remove, target, name)
            patching.put(target, name, value)
        yield


def without_all_reduce(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Changes, for `patched_attributes`, by which an optimizer takes gradients as they are, summed before or not."""
    return [(part, _SUM, list) for part in parts_of(optimizer)]


def patches_of_strategy(optimizer: Any, strategy: tf.distribute.Strategy) -> tuple[Any, str, Any]:
    """A change, for `patched_attributes`, by which an optimizer is one of this strategy."""
    return optimizer, "_distribution_strategy", strategy


def scaling_alone(optimizer: Any) -> list[tuple[Any, str, Any]]:
    """Changes, for `patched_attributes`, by which loss scaling applies without asking for replicas."""
    scaling = [each for each in parts_of(optimizer) if hasattr(each, "inner_optimizer")]
    return [(each, "_tf_apply", each._common_apply) for each in scaling]


# The variables of a Keras optimizer by the part that they play in it.
#
# There is no public way: `optimizer.variables` has them all in one list. The public names `learning_rate` and
# `iterations` give values rather than variables in some cases, and the variables that are trained have none at all.


_LISTS = ("_variables", "_trainable_variables")


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizer, and those in its attributes, as of loss scaling and of optimizers that divide variables."""
    found, waiting = dict[int, Any](), [optimizer]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, keras.optimizers.Optimizer):
            if id(each) not in found:
                found[id(each)] = each
                waiting.extend(value for name, value in vars(each).items() if name not in _LISTS)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)
    return list(found.values())


@contextlib.contextmanager
def undone_on_error(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within this block, a build of these optimizers that raises leaves them as they were.

    Keras' optimizers say that they are built, and append to their lists, before they make their slots.
    """
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    before = [(part, {name: _copied(value) for name, value in vars(part).items()}) for part in parts]
    try:
        yield
    except BaseException:
        for part, attributes in before:
            for name in vars(part).keys() - attributes.keys():
                object.__delattr__(part, name)
            for name, (value, content) in attributes.items():
                object.__setattr__(part, name, value)
                if content is not None and len(value) != len(content):
                    value.clear()
                    (value.update if isinstance(value, dict) else value.extend)(content)
        raise


def _copied(value: Any) -> tuple[Any, Any]:
    """The value, and what is in it if that may change."""
    is_dict = isinstance(value, dict)
    return value, dict(value) if is_dict else list(value) if isinstance(value, list) else None


def trained_by(optimizer: Any) -> Sequence[Any]:
    """The variables that a built optimizer updates, in its order; those of the one inside for loss scaling."""
    return getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables


def index_of(optimizer: Any, variable: Any) -> int:
    """The index of a variable in that order."""
    return optimizer._trainable_variables_indices[optimizer._var_key(variable)]


def indices_of(optimizer: Any, variables: Sequence[Any]) -> tuple[int, ...]:
    """The indices of variables in that order; an optimizer that is not built yet is built for them."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built:
        with tf.init_scope():
            inner.build(variables)
    return tuple(index_of(inner, variable) for variable in variables)


def loss_scale_of(optimizer: Any) -> tf.Tensor | None:
    """The present factor of an optimizer's loss; None if it has none."""
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return tf.convert_to_tensor(optimizer.dynamic_scale) if is_scaled else None


def learning_rate_of(optimizer: Any) -> Any:
    """The variable, or the schedule, that an optimizer takes its learning rate from; None for loss scaling."""
    return getattr(optimizer, "_learning_rate", None)


def iterations_of(optimizer: Any) -> Any:
    """The variable that counts an optimizer's updates."""
    return optimizer._iterations


def averages_of(optimizer: Any) -> Sequence[Any]:
    """The moving averages of the variables that it updates, in their order; none without `use_ema`."""
    return getattr(optimizer, "_model_variables_moving_average", None) or ()


def sums_of(optimizer: Any) -> Sequence[Any]:
    """The gradients that it accumulates, in the same order; none without `gradient_accumulation_steps`."""
    return getattr(optimizer, "_accumulated_gradients", None) or ()


def slots_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each variable that a built optimizer updates with each of the slots that it keeps for the variable."""
    trained = optimizer._trainable_variables
    others = {id(variable) for variable in [*trained, optimizer._iterations, learning_rate_of(optimizer)]}
    for name, kept in vars(optimizer).items():
        # Optimizers keep a list of slots of each kind, in the order of the variables.
        is_list = isinstance(kept, Sequence) and not isinstance(kept, str) and len(kept) == len(trained)
        if is_list and name not in _LISTS:
            pairs = zip(trained, kept, strict=True)
            yield from ((v, slot) for v, slot in pairs if isinstance(slot, keras.Variable) and id(slot) not in others)


def find_again(optimizer: Any) -> None:
    """Rebuilds the index of the variables that an optimizer updates, after their TensorFlow variables were replaced."""
    trained = optimizer._trainable_variables
    optimizer._trainable_variables_indices = {optimizer._var_key(variable): i for i, variable in enumerate(trained)}


# Makes a Keras optimizer update with gradients that the caller has accumulated.
#
# There is no public way: an optimizer with `gradient_accumulation_steps` adds gradients up in variables of its own, and
# updates by a count of its own. Everything that is changed is restored.


_STEPS = "gradient_accumulation_steps"


def apply_accumulated(
    optimizer: Any, apply: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Updates, by the optimizer's own `apply`, with gradients that are means of as many steps as it accumulates."""
    count = int(getattr(optimizer, _STEPS))
    # An update counts for as many gradients as it is made of, as on one device.
    optimizer._iterations.assign_add(count - 1)
    whole, update = optimizer._backend_apply_gradients, optimizer._backend_update_step

    def whole_without(*args: Any) -> Any:
        # First read: decides if the optimizer accumulates.
        object.__setattr__(optimizer, _STEPS, None)
        return whole(*args)

    def update_with(*args: Any) -> Any:
        # Later reads, for the iterations: number of steps.
        object.__setattr__(optimizer, _STEPS, count)
        return update(*args)

    changes = [
        (optimizer, _STEPS, count),
        (optimizer, "_backend_apply_gradients", whole_without),
        (optimizer, "_backend_update_step", update_with),
    ]
    with patched_attributes(changes):
        apply(gradients, variables)


# Adds up the rows of a sparse gradient that all replicas look up alike, such as positions of a sequence.
#
# Keras' optimizers square and clip each row of a `tf.IndexedSlices` before they add up rows of equal number. One device
# has a row for each lookup. So has the sum over replicas if a lookup depends on the examples: their rows are
# concatenated. But one device looks up positions, or unique ids, once for all examples, and every replica does it
# again. These rows must be added up.
#
# The operations of the graph tell lookups apart. Outside of a graph nothing does, and rows stay as they are.


# The output with row numbers of which none is there twice.
_UNIQUE = dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), 0) | dict.fromkeys(
    ("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2"), 1
)
_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


def are_common_rows(gradient: Any) -> bool:
    """Returns True if a sparse gradient, of a traced step, has rows that don't depend on a replica's examples."""
    if not isinstance(gradient, tf.IndexedSlices) or not tf.is_symbolic_tensor(gradient.indices):
        return False
    known = tf.get_static_value(gradient.indices)
    if known is not None and len(np.unique(known)) < len(known):
        # A row for each of a known number of examples.
        return False
    return _is_common(gradient.indices, {})


def added_up_rows(gradient: tf.IndexedSlices, count: int | tf.Tensor) -> tf.IndexedSlices:
    """Adds up rows that several replicas have in common.

    Args:
      gradient: the rows of all replicas, one after the other.
      count: number of replicas; an int32 scalar, at least 1.
    """
    values, indices = gradient.values, gradient.indices
    size = tf.size(indices) // count

    def by_place() -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.concat([[count, size], tf.shape(values)[1:]], 0)
        return tf.reduce_sum(tf.reshape(values, shape), 0), indices[:size]

    def by_number() -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.unique(indices)
        return tf.math.unsorted_segment_sum(values, found.idx, tf.size(found.y)), found.y

    is_same = tf.equal(size * count, tf.size(indices))
    repeated = tf.tile(indices[:size], [count])[: tf.size(indices)]
    is_same = tf.cond(is_same, lambda: tf.reduce_all(tf.equal(indices, repeated)), lambda: tf.constant(False))
    added, rows = tf.cond(is_same, by_place, by_number)
    added.set_shape([None, *values.shape[1:]])
    return tf.IndexedSlices(added, rows, gradient.dense_shape)


def _is_common(tensor: Any, known: dict[Any, bool]) -> bool:
    """Returns True if a tensor depends neither on data of the examples nor on their number."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    if tensor.ref() not in known:
        known[tensor.ref()] = False
        known[tensor.ref()] = _has_common_value(tensor, known)
    return known[tensor.ref()]


def _has_common_value(tensor: tf.Tensor, known: dict[Any, bool]) -> bool:
    operation = tensor.op
    if _UNIQUE.get(operation.type) == tensor.value_index:
        return True
    if operation.type in _READS or operation.type == "Const":
        return True
    if operation.type == "Placeholder":
        outer = graphs.captured_by(tensor)
        return outer is not None and _is_common(outer, known)
    if operation.type == "StridedSlice" and operation.inputs[0].op.type in _SHAPES:
        return _is_other_axis(operation)
    # The shape of common rows is common, too.
    if operation.op_def.is_stateful or not operation.inputs:
        return False
    return all(_is_common(each, known) for each in operation.inputs)


def _is_other_axis(operation: tf.Operation) -> bool:
    """Returns True if a part of a shape is taken that doesn't have the first axis, which is that of the examples."""
    shape, *where = operation.inputs
    begin, rank = tf.get_static_value(where[0]), tf.TensorShape(shape.shape).num_elements()
    if begin is None or operation.get_attr("begin_mask"):
        return False
    return bool(begin[0] > 0 or (begin[0] < 0 and (rank is None or begin[0] + rank > 0)))
