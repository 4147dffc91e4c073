# SPDX-License-Identifier: Apache-2.0
"""Files of NumPy arrays (`.npz`), of which those of tables are written and read a block of rows at a time."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any

import numpy as np

from tfdist.runtime import row_blocks


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array that is read by rows, because this process has no room for it.

    Attributes:
      shape: of the whole.
      dtype: of the elements.
      blocks: yields blocks of consecutive rows, all of which together are the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Callable[[], Iterator[np.ndarray]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads all of it."""
        del copy  # A copy each time.
        whole, first = np.empty(self.shape, self.dtype), 0
        for block in self.blocks():
            whole[first : first + len(block)] = block
            first += len(block)
        return whole.astype(dtype or self.dtype, copy=False)


def write(file: IO[bytes], arrays: Sequence[np.ndarray | Rows]) -> None:
    """Writes what `np.savez` would write of the arrays by their numbers, which `np.load` reads."""
    with zipfile.ZipFile(file, "w") as archive:
        for index, array in enumerate(arrays):
            with archive.open(f"{index}.npy", "w", force_zip64=True) as member:
                if isinstance(array, Rows):
                    descr = np.lib.format.dtype_to_descr(array.dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": tuple(array.shape)}
                    np.lib.format.write_array_header_1_0(member, header)
                    for block in array.blocks():
                        member.write(np.ascontiguousarray(block).view(np.uint8).data)
                else:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read(path: pathlib.Path, count: int, by_rows: Collection[int]) -> tuple[np.ndarray | Rows, ...]:
    """Reads arrays 0 to count - 1; those with a number in `by_rows` are looked through, and read when needed.

    Raises:
      ValueError: or another error that damaged files raise.
    """
    with np.load(path, allow_pickle=False) as arrays:
        return tuple(_rows(path, index) if index in by_rows else arrays[str(index)] for index in range(count))


def _rows(path: pathlib.Path, index: int) -> Rows:
    with zipfile.ZipFile(path) as archive, archive.open(f"{index}.npy") as member:
        shape, dtype = _header(member)
        # To the end, where the check sum is compared.
        while member.read(1 << 20):
            pass

    def blocks() -> Iterator[np.ndarray]:
        with zipfile.ZipFile(path) as archive, archive.open(f"{index}.npy") as member:
            _header(member)
            for first, last in row_blocks.ranges(shape, dtype.itemsize):
                size = (last - first) * math.prod(shape[1:]) * dtype.itemsize
                yield np.frombuffer(member.read(size), dtype).reshape(last - first, *shape[1:])

    return Rows(shape, dtype, blocks)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    np.lib.format.read_magic(member)
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    return shape, dtype
