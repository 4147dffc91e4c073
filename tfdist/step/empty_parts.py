# SPDX-License-Identifier: Apache-2.0
"""Steps of replicas without an example of the batch: they run on a stand-in example, and its results are left out.

Layers and kernels may fail, or return wrong shapes, on a batch of no examples; oneDNN's convolutions do. The replica
can't skip the step either, since replicas wait for each other. So an empty part is filled with one example: a copy of
another replica's where this process has one, else zeros. Its gradients, logs and statistics have weight 0, which also
removes NaN; its metrics are restored after the step; its terms of sums over replicas are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.tensorflow import graphs, replicas
from tfdist.passes import splitting
from tfdist.step import one_replica

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


def may_occur(parts: Sequence[Any]) -> bool:
    """Returns True if, by the static shapes, one of these parts of a batch may have no examples."""
    sizes = {splitting.static_size(part) for part in parts}
    return bool(sizes & {0, None}) and all(splitting.rows(part) is not None for part in parts)


def filled(part: Any, sources: Sequence[Any] = ()) -> Any:
    """Returns the part itself, or one example if it has none.

    Args:
      part: a replica's part of a batch.
      sources: other parts of the same batch, or the first example of each; the first one that is not empty is copied.
        If all are empty, the example is zeros.
    """
    rows = splitting.rows(part)
    if rows is None or (splitting.static_size(part) or 0) > 0:
        return part
    leaves = tf.nest.flatten(part)
    chosen = [index for index, leaf in enumerate(leaves) if _has_rows(leaf)]
    candidates = [tf.nest.flatten(source) for source in sources]

    def itself() -> list[Any]:
        return [tf.nest.map_structure(tf.identity, leaves[index], expand_composites=True) for index in chosen]

    def example() -> list[Any]:
        return [_example(leaves[index], [each[index] for each in candidates]) for index in chosen]

    # A list of one is returned as its element.
    results = tf.nest.flatten(tf.cond(rows > 0, itself, example))
    for index, leaf in zip(chosen, results, strict=True):
        if isinstance(leaf, tf.Tensor):
            leaf.set_shape([None, *leaves[index].shape[1:]])
        leaves[index] = leaf
    return tf.nest.pack_sequence_as(part, leaves)


def filled_on_devices(parts: dict[str, Any]) -> list[Any]:
    """Returns the parts of a process' replicas, by device, each with an example."""
    devices, values = list(parts), list(parts.values())
    sources = []
    # One example is sent to the other devices instead of a whole part. Splitting leaves the last part an example.
    for index in dict.fromkeys((len(values) - 1, 0)) if len(values) > 1 else ():
        with tf.device(devices[index]):
            sources.append(first(values[index]))
    results = []
    for device, part in zip(devices, values, strict=True):
        with tf.device(device):
            results.append(filled(part, sources))
    return results


def first(part: Any) -> Any:
    """Returns the first example of a part; no example if it is empty."""
    return tf.nest.map_structure(lambda leaf: _rows_up_to(leaf, 1) if _has_rows(leaf) else leaf, part)


def only_with_examples(rows: tf.Tensor, result: Any) -> Any:
    """Returns a replica's result, with no rows if the replica has no examples."""
    return tf.nest.map_structure(
        lambda leaf: _rows_up_to(leaf, tf.where(rows > 0, splitting.rows(leaf), 0)) if _has_rows(leaf) else leaf, result
    )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, _TENSORS) and leaf.shape.rank != 0


def _rows_up_to(leaf: Any, stop: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[tf.minimum(tf.cast(stop, tf.int64), leaf.dense_shape[0])], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, tf.zeros_like(size), size)
    return leaf[:stop]


def _example(leaf: Any, sources: Sequence[Any]) -> Any:
    """Returns the first row of these sources, or zeros; `leaf` has no rows."""
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.sparse.concat(0, [_rows_up_to(source, 1) for source in sources]) if sources else leaf
        one = tf.concat([tf.ones([1], tf.int64), leaf.dense_shape[1:]], 0)
        kept = rows.indices[:, 0] < 1
        return tf.SparseTensor(rows.indices[kept], rows.values[kept], one)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.concat([*(source[:1] for source in sources), _ragged_zeros(leaf)], 0)[:1]
    zeros = tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)
    return tf.concat([*(source[:1] for source in sources), zeros], 0)[:1]


def _ragged_zeros(leaf: tf.RaggedTensor) -> Any:
    """Returns a row of one zero: a layer may fail on an empty row, too."""
    if not isinstance(leaf, tf.RaggedTensor):
        return tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)
    return tf.RaggedTensor.from_row_splits(_ragged_zeros(leaf.values), tf.constant([0, 1], leaf.row_splits.dtype))


class Kept:
    """The values of variables on a replica before a step.

    Args:
      copies: the variables of that replica's device.
    """

    def __init__(self, copies: Iterable[tf.Variable]) -> None:
        self._before = []
        for copy in copies:
            with tf.device(copy.device):
                self._before.append((copy, copy.read_value()))

    def restore_unless(self, rows: tf.Tensor) -> None:
        """Gives the variables these values again if the replica had no examples."""

        def restore() -> tf.Tensor:
            for copy, value in self._before:
                with tf.device(copy.device):
                    copy.assign(value)
            return tf.constant(True)

        if self._before:
            tf.cond(rows > 0, lambda: tf.constant(False), restore)


def counted_by(model: keras.Model, left_out: Sequence[Any] = ()) -> list[Any]:
    """Returns the Keras variables in which each replica counts its own examples.

    Statistics of layers, which are floats, are not among them: they are averaged by the numbers of examples.

    Args:
      model: the model.
      left_out: metrics that count right without examples, too.
    """
    others = [metric for metric in model.metrics if not any(metric is each for each in left_out)]
    variables = [variable for metric in others for variable in metric.variables]
    variables += [
        variable
        for variable in model.non_trainable_variables
        if one_replica.is_counter(variable) and not tf.as_dtype(variable.dtype).is_floating
    ]
    return [variable for variable in {id(v): v for v in variables}.values() if one_replica.is_mirrored(variable)]


def without_terms(step: Callable[..., Any], rows: Sequence[tf.Tensor]) -> Callable[..., Any]:
    """Returns a step in which a replica without examples adds zeros to sums over the replicas, forward and backward.

    Synchronized BatchNormalization and users' losses call `ReplicaContext.all_reduce`, whose gradient calls it again.

    Args:
      step: called in replica context.
      rows: the examples of each replica of this worker.
    """
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step
    step = graphs.converted(step)

    def call(*args: Any) -> Any:
        context = tf.distribute.get_replica_context()
        all_reduce, own = context.all_reduce, rows[replicas.current()]

        def masked(reduce_op: Any, value: Any, options: Any = None) -> Any:
            is_sum = str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM"
            return all_reduce(reduce_op, tf.nest.map_structure(select, value) if is_sum else value, options)

        def select(leaf: Any) -> Any:
            if not tf.is_tensor(leaf) or isinstance(leaf, tf.IndexedSlices):
                return leaf
            value = tf.convert_to_tensor(leaf)
            return tf.where(own > 0, value, tf.zeros_like(value))

        context.all_reduce = masked
        try:
            return step(*args)
        finally:
            del context.all_reduce

    return call
