# SPDX-License-Identifier: Apache-2.0
"""Arrays that TensorFlow takes without a copy, in memory that is used again.

A new array of 100 MB costs 25,000 page faults, which take as long as the sum that is written to it. So each traced
function keeps its large arrays, and writes the next step's into those that TensorFlow has released.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

# numpy_function passes arrays to TensorFlow without a copy if they are aligned as its own tensors are.
_ALIGNMENT = 64
# Below this size malloc itself keeps freed memory.
_MIN_BYTES = 1 << 20


class Pool:
    """Float32 arrays for one function. Memory is free when no array, view or tensor refers to it any more.

    The pool keeps as much as was in use at one time: one array more than the state, for an encoder. It ends with the
    graph of its function. Safe to use by several threads.
    """

    def __init__(self) -> None:
        self._memories: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def empty(self, size: int) -> np.ndarray:
        """Returns float32 [size] of any content."""
        if 4 * size < _MIN_BYTES:
            return _aligned(_memory(size), size)
        with self._lock:
            return _aligned(self._take(size), size)

    def zeros(self, size: int) -> np.ndarray:
        """Returns zeros, float32 [size]."""
        array = self.empty(size)
        array.fill(0)
        return array

    def _take(self, size: int) -> np.ndarray:
        memories = self._memories.setdefault(size, [])
        for index in range(len(memories)):
            # Views of views refer to the memory itself. Here, the list and the argument of getrefcount do.
            if sys.getrefcount(memories[index]) == 2:
                return memories[index]
        memories.append(_memory(size))
        return memories[-1]


def _memory(size: int) -> np.ndarray:
    return np.empty(4 * size + _ALIGNMENT, np.uint8)


def _aligned(memory: np.ndarray, size: int) -> np.ndarray:
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + 4 * size].view(np.float32)
