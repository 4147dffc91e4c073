# SPDX-License-Identifier: Apache-2.0
"""Looks up rows of a Keras variable in shards on the servers that have them.

There is no public way. `tf.gather` calls `sparse_read` of a variable, if it has one; a Keras variable has none, and so
is read whole. `keras.ops.take`, which `keras.layers.Embedding` calls, reads it besides for its number of rows:
TensorFlow makes that read although nothing depends on it, and a read copies a variable whose rows have ever been
written. Both changes are permanent, and ones of variables in shards alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.compat import keras_variables, replacing

NEEDS = ("keras:Variable._value", "keras.src.backend.tensorflow.numpy:take(x, indices, axis)")


def install(has_shards: Callable[[Any], bool]) -> None:
    """Gives Keras variables `sparse_read`, and has `keras.ops.take` call it.

    Args:
      has_shards: returns True for the TensorFlow variables whose rows are to be looked up.
    """

    def sparse_read(variable: Any) -> Callable[..., Any]:
        found = keras_variables.tf_variable(variable)
        if not has_shards(found):
            raise AttributeError("sparse_read")
        return found.sparse_read

    keras.Variable.sparse_read = property(sparse_read)
    replacing.once(backend.numpy, "take", _looking_up(has_shards))


def _looking_up(has_shards: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def take(x: Any, indices: Any, axis: int | None = None) -> Any:
            table = keras_variables.tf_variable(x) if isinstance(x, keras.Variable) else None
            return _rows(table, indices) if axis == 0 and has_shards(table) else original(x, indices, axis)

        return take

    return wrap


def _rows(table: Any, indices: Any) -> Any:
    """Returns the result of Keras' `take` for the first axis: negative indices count from the end."""
    count = table.shape[0]

    def counted(values: tf.Tensor) -> tf.Tensor:
        # Ids that are out of range stay as they are, for the error's text.
        from_end = values + tf.cast(count, values.dtype)
        return tf.where((values < 0) & (from_end >= 0), from_end, values)

    if isinstance(indices, tf.SparseTensor):
        ids = tf.sparse.expand_dims(tf.SparseTensor(indices.indices, counted(indices.values), indices.dense_shape), -1)
        rows = tf.nn.safe_embedding_lookup_sparse(table, ids, default_id=0)
        rows.set_shape(indices.shape + rows.shape[len(indices.shape) :])
        return rows
    if isinstance(indices, tf.RaggedTensor):
        return tf.ragged.map_flat_values(lambda values: table.sparse_read(counted(values)), indices)
    return table.sparse_read(counted(tf.convert_to_tensor(indices)))
