# SPDX-License-Identifier: Apache-2.0
"""ShardedTables: a `variable_partitioner` that puts large tables on all parameter servers. No TensorFlow import."""

from __future__ import annotations

import math
from typing import Any

from tfdist import _checks

_SMALLEST = 1 << 10
# Bytes of an element, by the names of dtypes that are not of four bytes.
_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}


class ShardedTables:
    """Partitions matrices of at least `min_bytes` by rows, a shard for each parameter server.

        tfdist.ParameterServerStrategy(variable_partitioner=tfdist.ShardedTables())

    Vectors, and arrays of more than two axes such as kernels of convolutions, stay whole.

    Args:
      min_bytes: size of the smallest matrix that is partitioned.
      max_shards: most shards of a matrix; by default as many as there are parameter servers.

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(self, min_bytes: int = 16 << 20, max_shards: int | None = None) -> None:
        if not _checks.is_count(min_bytes, at_least=_SMALLEST):
            raise ValueError(
                f"ShardedTables(min_bytes=...) must be an integer of at least {_SMALLEST}: smaller ones cost more "
                f"round trips than they save. Received: min_bytes={min_bytes!r}"
            )
        if max_shards is not None and not _checks.is_count(max_shards):
            raise ValueError(
                "ShardedTables(max_shards=...) must be an integer of at least 1, or None for one shard per parameter "
                f"server. Received: max_shards={max_shards!r}"
            )
        self.min_bytes = min_bytes
        self.max_shards = max_shards
        self._num_ps = 1

    def __repr__(self) -> str:
        return f"ShardedTables(min_bytes={self.min_bytes}, max_shards={self.max_shards})"

    def begin(self, num_ps: int) -> None:
        """Sets the number of parameter servers; called by the strategy."""
        self._num_ps = num_ps

    def __call__(self, shape: Any, dtype: Any, **unused: Any) -> list[int]:
        """Returns the number of shards along each axis, as a `variable_partitioner` does."""
        del unused
        sizes = [int(size) for size in shape]
        # A dtype of TensorFlow, or its name, as Keras gives it.
        size = getattr(dtype, "size", None) or _BYTES.get(str(dtype), 4)
        is_table = len(sizes) == 2 and math.prod(sizes) * size >= self.min_bytes
        most = min(self._num_ps, self.max_shards or self._num_ps, sizes[0]) if is_table else 1
        return [max(1, most), *[1] * (len(sizes) - 1)]


def fitting(partitioner: Any) -> Any:
    """Returns a `variable_partitioner` that makes at most as many shards as there are rows; None stays None."""
    if partitioner is None:
        return None

    def partition(shape: Any, dtype: Any, **more: Any) -> list[int]:
        count, *others = partitioner(shape=shape, dtype=dtype, **more)
        return [min(count, max(1, int(shape[0]))), *others]

    return partition
