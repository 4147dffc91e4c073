# SPDX-License-Identifier: Apache-2.0
"""Blocks of rows in which tables are read and written, so that no process holds a second copy of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

# Bytes of the rows that are in memory besides the table, or shard.
BLOCK_BYTES = 16 << 20


def ranges(shape: Sequence[int], item_bytes: int, aligned_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """Yields first row and end of each block of an array.

    Args:
      shape: of the array.
      item_bytes: bytes of an element.
      aligned_bytes: each block begins at a multiple of so many bytes.
    """
    row_bytes = max(1, math.prod(shape[1:]) * item_bytes)
    multiple = aligned_bytes // math.gcd(aligned_bytes, row_bytes)
    size = max(multiple, BLOCK_BYTES // row_bytes // multiple * multiple)
    yield from ((first, min(shape[0], first + size)) for first in range(0, shape[0], size))
