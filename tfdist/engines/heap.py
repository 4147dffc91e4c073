# SPDX-License-Identifier: Apache-2.0
"""Has the C library keep the memory that a step frees for the next step. No TensorFlow import.

TensorFlow allocates the tensors of a step with the C library's `malloc` and frees them in the same step. glibc gives
what is large back to the kernel at once, and gets it anew, page by page and zeroed, in the next step: with 25 million
parameters that is 400 MB and 100,000 page faults in each step of `MultiWorkerMirroredStrategy`.

What is kept is as much as the process has used at its peak. Whoever wants something else says so with the variables of
mallopt(3), MALLOC_TRIM_THRESHOLD_ and its like, or with GLIBC_TUNABLES, and nothing is changed here.
"""

from __future__ import annotations

import ctypes
import os

# <malloc.h>, which Python has no names for; they are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {
    # Never give back the free end of the heap.
    _M_TRIM_THRESHOLD: -1,
    # As large as the heap of a thread: keeps those that are free all over.
    _M_TOP_PAD: 64 << 20,
    # Larger blocks, such as a data set in memory, are still given back when they are freed.
    _M_MMAP_THRESHOLD: 1 << 30,
}


def keep_freed_memory() -> bool:
    """Sets `malloc` of this process, for good, to keep what is freed.

    Returns:
      Whether it was done: not if the environment has settings of its own, nor with a C library that has no `mallopt`.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(setting, value) == 1 for setting, value in _SETTINGS.items()]
    return all(taken)
