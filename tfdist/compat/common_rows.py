# SPDX-License-Identifier: Apache-2.0
"""Adds up the rows of a sparse gradient that all replicas look up alike, such as positions of a sequence.

Keras' optimizers square and clip each row of a `tf.IndexedSlices` before they add up rows of equal number. One device
has a row for each lookup, and so has the sum over replicas where a lookup depends on the examples: their rows are put
one after the other. But one device looks up positions, or ids that the step has made unique, once for all examples, and
every replica does it again: these rows must be added up.

The operations of the graph tell lookups apart. Outside of a graph nothing does, and rows stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_UNIQUE = frozenset({"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


def are_common(gradient: Any) -> bool:
    """Returns True if a sparse gradient, of a traced step, has rows that don't depend on a replica's examples."""
    if not isinstance(gradient, tf.IndexedSlices) or not tf.is_symbolic_tensor(gradient.indices):
        return False
    known = tf.get_static_value(gradient.indices)
    if known is not None and len(np.unique(known)) < len(known):
        # A row for each of a known number of examples.
        return False
    return _is_common(gradient.indices, {})


def added_up(gradient: tf.IndexedSlices, count: int | tf.Tensor) -> tf.IndexedSlices:
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
    if operation.type in _UNIQUE and tensor is operation.outputs[0]:
        return True
    if operation.type in _READS or operation.type == "Const":
        return True
    if operation.type == "Placeholder":
        outer = next((outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor), None)
        return outer is not None and _is_common(outer, known)
    if operation.type == "StridedSlice" and operation.inputs[0].op.type in _SHAPES:
        return _is_other_axis(operation)
    if operation.type in _SHAPES or operation.op_def.is_stateful or not operation.inputs:
        return False
    return all(_is_common(each, known) for each in operation.inputs)


def _is_other_axis(operation: tf.Operation) -> bool:
    """Returns True if a part of a shape is taken that doesn't have the first axis, which is that of the examples."""
    shape, *where = operation.inputs
    begin, rank = tf.get_static_value(where[0]), tf.TensorShape(shape.shape).num_elements()
    if begin is None or operation.get_attr("begin_mask"):
        return False
    return bool(begin[0] > 0 or (begin[0] < 0 and (rank is None or begin[0] + rank > 0)))
