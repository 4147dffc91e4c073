# SPDX-License-Identifier: Apache-2.0
"""The part of a variable that an update is made of: a shard, some rows, or rows of a shard.

An optimizer's update of one variable also reads and writes slots of the same shape. While `updating` is entered, the
variable and all others with the same shards stand for the same part of them, so that Keras' formula is used unchanged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

# Write of rows for each write of the whole.
_SCATTER_OF = {"assign": "scatter_update", "assign_add": "scatter_add", "assign_sub": "scatter_sub"}


class Part(NamedTuple):
    """A part of the variables that have the same shards.

    Attributes:
      index: of the shard.
      sizes: rows of each shard; one number for a variable that is not in shards.
      rows: int64 [rows], indices within the shard; None for all of it.
    """

    index: int
    sizes: tuple[int, ...]
    rows: tf.Tensor | None

    def read(self, shard: Any) -> tf.Tensor:
        """Returns the part's value; `shard` is the variable at `index`."""
        return shard.read_value() if self.rows is None else shard.sparse_read(self.rows)

    def write(self, shard: Any, method: str, value: Any, kwargs: dict[str, Any]) -> None:
        """Writes the part by `assign`, `assign_add` or `assign_sub`."""
        if self.rows is None:
            getattr(shard, method)(value, **kwargs)
        else:
            slices = tf.IndexedSlices(tf.convert_to_tensor(value, shard.dtype), self.rows)
            getattr(shard, _SCATTER_OF[method])(slices)

    def shape(self, whole: tf.TensorShape) -> tf.TensorShape:
        """Returns the part's static shape."""
        return tf.TensorShape([self.sizes[self.index] if self.rows is None else None, *whole[1:]])


class _Updating(threading.local):
    part: Part | None = None


_updating = _Updating()


@contextlib.contextmanager
def updating(part: Part) -> Iterator[None]:
    """Context in which variables with the same shards stand for their part, in this thread."""
    before, _updating.part = _updating.part, part
    try:
        yield
    finally:
        _updating.part = before


def part_of(sizes: tuple[int, ...]) -> Part | None:
    """Returns the part that variables with these shards stand for, or None for the whole."""
    part = _updating.part
    return part if part is not None and part.sizes == sizes else None
