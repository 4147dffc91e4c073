# SPDX-License-Identifier: Apache-2.0
"""All-gather of tensors of any dtype, strings and ragged tensors.

TensorFlow's all-gather takes float16, float32, float64, int32 and int64. Other dtypes are cast or bitcast to one of
these without loss. Strings become their bytes, padded to the longest one of all replicas. A ragged tensor is gathered
by its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import replicas

_TAKEN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# Of the same size; complex128 gets another axis, of its two parts.
_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64, tf.complex128: tf.float64}


def gather(stock: Callable[[Any], Any], local: Callable[[Any], tuple[Any, ...]], value: Any) -> Any:
    """Puts the values of all replicas together along the axis that `stock` gathers along.

    Args:
      stock: TensorFlow's all-gather along this axis, of tensors of the dtypes that it takes.
      local: returns the values of this process' replicas.
      value: tensor, `tf.RaggedTensor`, or one for each replica; strings and ragged tensors along axis 0 only.

    Raises:
      ValueError: the value is sparse.
    """

    def each(function: Callable[[Any], Any], given: Any) -> Any:
        parts = [function(one) for one in local(given)]
        return parts[0] if len(parts) == 1 else replicas.values_of_replicas(parts)

    first = local(value)[0]
    if isinstance(first, tf.SparseTensor):
        raise ValueError(
            "A SparseTensor can't be gathered from several workers; return tf.sparse.to_dense(...) of it, as from "
            f"predict_step. Received: {first.dtype.name}, shape {first.shape}"
        )
    if isinstance(first, tf.RaggedTensor):
        values = gather(stock, local, each(lambda ragged: ragged.values, value))
        lengths = stock(each(lambda ragged: ragged.row_lengths(), value))
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if not isinstance(first, tf.Tensor) or first.dtype in _TAKEN:
        return stock(value)
    dtype = first.dtype
    if dtype == tf.string:
        # With an empty one, so that there is a longest one.
        flat = each(lambda strings: tf.concat([tf.reshape(strings, [-1]), [""]], 0), value)
        longest = each(lambda strings: tf.reduce_max(tf.strings.length(strings), keepdims=True), flat)
        width = tf.maximum(tf.reduce_max(stock(longest)), 1)
        codes = stock(each(lambda strings: _bytes(strings, width), value))
        return tf.strings.reduce_join(tf.gather([b"", *(bytes([code]) for code in range(256))], codes), -1)
    if dtype in _BITS:
        return tf.bitcast(stock(each(lambda tensor: tf.bitcast(tensor, _BITS[dtype]), value)), dtype)
    other = tf.float32 if dtype.is_floating else tf.int32
    return tf.cast(stock(each(lambda tensor: tf.cast(tensor, other), value)), dtype)


def _bytes(strings: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    """Returns int32 codes with one axis more: bytes plus 1, and 0 behind the end."""
    codes = tf.cast(tf.io.decode_raw(strings, tf.uint8, fixed_length=width), tf.int32)
    return tf.where(tf.range(width) < tf.strings.length(strings)[..., None], codes + 1, 0)
