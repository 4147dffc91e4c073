# SPDX-License-Identifier: Apache-2.0
"""Reads and writes blocks of rows of a shard on its server, so that no process ever holds a second copy of the shard.

A read of a variable whose rows are written singly copies all of it, and so does an assignment of a slice. Gathers,
scatters, and reads that end the copying (`DisableCopyOnRead`) don't.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.runtime import row_blocks

# A slice of the shard's tensor shares its memory if it begins at a multiple of so many bytes.
_ALIGNED_BYTES = 64


def blocks(shard: Any) -> Iterator[tuple[int, int]]:
    """Yields first row and end of each block of a shard."""
    return row_blocks.ranges(shard.shape.as_list(), shard.dtype.size, _ALIGNED_BYTES)


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
