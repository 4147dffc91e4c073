# SPDX-License-Identifier: Apache-2.0
"""Access to the compiled part of the codecs (_native.c) by ctypes, which releases the GIL; or its NumPy fallback.

The library is plain C without Python's interface, so it is loaded by its file name and can't be imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import pathlib
from typing import Any

import numpy as np

from tfdist import _log
from tfdist.compression import fallback

# Version of _native.c. It changes with each change of a function's arguments or results.
VERSION = 3
_WHY = {
    -1: "the quotients end before the last entry",
    -2: "an entry is beyond the last value",
    -3: "bytes follow the last entry",
}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "tfdist_add": [*[_POINTER] * 3, _INT, _FLOAT, _INT, _POINTER, _INT],
    "tfdist_correct": [*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _INT, _FLOAT, _INT, _POINTER, _INT],
    "tfdist_scatter": [_POINTER, _INT, _POINTER, _INT, _FLOAT],
    "tfdist_take_signs": [_POINTER, _INT, _FLOAT, _POINTER],
    "tfdist_add_signs": [_POINTER, _INT, _FLOAT, _POINTER],
    "tfdist_rice_zeros": [_POINTER, _INT, _INT],
    "tfdist_rice_encode": [_POINTER, _INT, _INT, *[_POINTER] * 3],
    "tfdist_rice_decode": [*[_POINTER] * 2, _INT, _POINTER, *[_INT] * 4, _POINTER],
}


class NativeKernels:
    """The functions of `tfdist.compression.fallback.NumpyKernels`, compiled.

    Args:
      path: the library's file.

    Raises:
      OSError: the library can't be loaded, or is of another version.
    """

    name = "native"

    def __init__(self, path: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            version = self._library.tfdist_version()
            for name, arguments in _ARGUMENTS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, _INT
        except AttributeError as error:
            raise OSError(f"{path} lacks a function: {error}") from None
        if version != VERSION:
            raise OSError(f"{path} has version {version}, needed is {VERSION}")

    def add(
        self, a: np.ndarray, b: np.ndarray, out: np.ndarray, bound: float, first: int, entries: np.ndarray
    ) -> int | None:
        """See `NumpyKernels.add`."""
        floats = [_address(array, np.float32, out.size) for array in (a, b, out)]
        count = self._library.tfdist_add(*floats, out.size, bound, first, *_sized(entries, np.int64))
        return None if count < 0 else count

    def correct(
        self,
        velocity: np.ndarray,
        accumulated: np.ndarray,
        gradient: np.ndarray,
        momentum: float,
        new_velocity: np.ndarray,
        out: np.ndarray,
        bound: float,
        first: int,
        entries: np.ndarray,
    ) -> int | None:
        """See `NumpyKernels.correct`."""
        inputs = [_address(array, np.float32, out.size) for array in (velocity, accumulated, gradient)]
        outputs = [_address(array, np.float32, out.size) for array in (new_velocity, out)]
        count = self._library.tfdist_correct(
            *inputs, momentum, *outputs, out.size, bound, first, *_sized(entries, np.int64)
        )
        return None if count < 0 else count

    def scatter(self, values: np.ndarray, first: int, entries: np.ndarray, value: float) -> None:
        """See `NumpyKernels.scatter`."""
        if entries.size and not first <= int(entries[0]) >> 1 <= int(entries[-1]) >> 1 < first + values.size:
            raise IndexError(f"entries are outside of {values.size} values from {first} on")
        pointer = _address(values, np.float32, values.size)
        self._library.tfdist_scatter(pointer, first, *_sized(entries, np.int64), value)

    def take_signs(self, values: np.ndarray, scale: float) -> np.ndarray:
        """See `NumpyKernels.take_signs`."""
        bits = np.empty((values.size + 7) // 8, np.uint8)
        self._library.tfdist_take_signs(*_sized(values, np.float32), scale, _address(bits, np.uint8, bits.size))
        return bits

    def add_signs(self, values: np.ndarray, scale: float, bits: np.ndarray) -> None:
        """See `NumpyKernels.add_signs`."""
        pointer = _address(bits, np.uint8, (values.size + 7) // 8)
        self._library.tfdist_add_signs(*_sized(values, np.float32), scale, pointer)

    def zeros(self, entries: np.ndarray, k: int) -> int:
        """See `NumpyKernels.zeros`."""
        return self._library.tfdist_rice_zeros(*_sized(entries, np.int64), k)

    def encode(
        self, entries: np.ndarray, k: int, signs: np.ndarray | None, remainders: np.ndarray, unary: np.ndarray
    ) -> None:
        """See `NumpyKernels.encode`."""
        # C stores 8 bytes at a time, so the streams are written to memory with room behind it.
        streams = [None if s is None else np.zeros(s.size + 8, np.uint8) for s in (signs, remainders, unary)]
        self._library.tfdist_rice_encode(*_sized(entries, np.int64), k, *map(_address_or_null, streams))
        for stream, into in zip(streams, (signs, remainders, unary), strict=True):
            if stream is not None and into is not None:
                into[:] = stream[: into.size]

    def decode(
        self, signs: np.ndarray | None, remainders: np.ndarray, unary: np.ndarray, count: int, k: int, size: int
    ) -> np.ndarray:
        """See `NumpyKernels.decode`."""
        entries = np.empty(count, np.int64)
        if count == 0:
            return entries
        failed = self._library.tfdist_rice_decode(
            _address_or_null(signs),
            *_sized(remainders, np.uint8),
            *_sized(unary, np.uint8),
            count,
            k,
            size,
            _address(entries, np.int64, count),
        )
        if failed:
            raise ValueError(_WHY[failed])
        return entries


Kernels = fallback.NumpyKernels | NativeKernels


def library_path() -> pathlib.Path | None:
    """Returns the file of the compiled library, or None if the installation has none."""
    here = pathlib.Path(__file__).parent
    paths = [here / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


@functools.cache
def kernels() -> Kernels:
    """Returns the compiled kernels, or those of NumPy with one line that says so. Chosen once per process."""
    path = library_path()
    try:
        if path is None:
            raise OSError("tfdist was installed without a C compiler")
        return NativeKernels(path)
    except OSError as error:
        _log.say(
            f"compression runs in NumPy, up to twice as long as compiled: {error}. Install a C compiler "
            "(gcc or clang), and then tfdist again."
        )
        return fallback.NumpyKernels()


def _address(array: np.ndarray, dtype: Any, size: int) -> int:
    if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
        raise TypeError(f"needs {size} contiguous values of {np.dtype(dtype)}. Received: {array.size}, {array.dtype}")
    return array.ctypes.data


def _sized(array: np.ndarray, dtype: Any) -> tuple[int, int]:
    return _address(array, dtype, array.size), array.size


def _address_or_null(array: np.ndarray | None) -> int | None:
    return None if array is None else _address(array, np.uint8, array.size)
