# SPDX-License-Identifier: Apache-2.0
"""Reads and writes blocks of rows of a shard on its server, so that no process ever holds a second copy of the shard.

A read of a variable whose rows are written singly copies all of it, and so does an assignment of a slice. Gathers,
scatters, and reads that end the copying (`DisableCopyOnRead`) don't.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# Bytes of the rows that are in memory besides the shard.
BLOCK_BYTES = 16 << 20
# A slice of the shard's tensor shares its memory if it begins at a multiple of so many bytes.
_ALIGNED_BYTES = 64


def blocks(rows: int, shape: Sequence[int], dtype: tf.DType) -> Iterator[tuple[int, int]]:
    """Yields first row and end of each block of a shard.

    Args:
      rows: of the shard.
      shape: of the shard, or of the whole.
      dtype: of its elements.
    """
    row_bytes = max(1, math.prod(shape[1:]) * dtype.size)
    multiple = _ALIGNED_BYTES // math.gcd(_ALIGNED_BYTES, row_bytes)
    size = max(multiple, BLOCK_BYTES // row_bytes // multiple * multiple)
    yield from ((first, min(rows, first + size)) for first in range(0, rows, size))


def read(shard: Any, first: int, last: int) -> tf.Tensor:
    """Returns rows first to last - 1, gathered on the server."""
    with tf.device(shard.device):
        ids = tf.range(first, last, dtype=tf.int64)
        return tf.raw_ops.ResourceGather(resource=shard.handle, indices=ids, dtype=shard.dtype)


def write(shard: Any, first: int, last: int, rows: Any) -> Any:
    """Writes rows first to last - 1 in place; returns the operation, None where operations run at once."""
    with tf.device(shard.device):
        ids = tf.range(first, last, dtype=tf.int64)
        updates = tf.convert_to_tensor(rows, shard.dtype)
        return tf.raw_ops.ResourceScatterUpdate(resource=shard.handle, indices=ids, updates=updates)


def shared(shard: Any, first: int, last: int) -> tf.Tensor:
    """Returns rows first to last - 1 as a part of the shard's own memory, for a moment in which nobody writes it."""
    with tf.device(shard.device):
        end = tf.raw_ops.DisableCopyOnRead(resource=shard.handle)
        with tf.control_dependencies([end] if end is not None else []):
            value = tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype)
        value.set_shape(shard.shape)
        return value if (first, last) == (0, shard.shape[0]) else value[first:last]
