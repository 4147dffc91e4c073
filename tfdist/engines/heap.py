# SPDX-License-Identifier: Apache-2.0
"""Has the C library keep the memory that a step frees for the next step. No TensorFlow import.

TensorFlow allocates the tensors of a step with the C library's `malloc` and frees them in the same step. glibc gives
what is large back to the kernel at once, and gets it anew, page by page and zeroed, in the next step: with 25 million
parameters that is 400 MB and 100,000 page faults in each step of `MultiWorkerMirroredStrategy`.

A process stays about as large as it was at its peak, or larger: each arena of glibc keeps its own peak, and blocks
beyond 64 MiB are kept for the main thread alone. So where large tensors come and go through the threads of gRPC there
can be as few arenas as CPUs, and not eight times as many.

Whoever wants something else says so with the variables of mallopt(3), MALLOC_TRIM_THRESHOLD_ and its like, or with
GLIBC_TUNABLES, and nothing is changed here.
"""

from __future__ import annotations

import ctypes
import os

from tfdist.engines import cpus

# <malloc.h>, which Python has no names for; they are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
# Blocks of this size and more, such as a data set in memory, are given back when they are freed. Before 2.35 glibc
# takes no more than half the size of a thread's heap.
_MMAP_THRESHOLDS = (1 << 30, 32 << 20)
# As large as the heap of a thread: keeps those that are free all over.
_TOP_PAD = 64 << 20


def keep_freed_memory(few_arenas: bool) -> bool:
    """Sets `malloc` of this process, for good, to keep what is freed.

    Args:
      few_arenas: whether its threads share as many arenas as there are CPUs. What one thread frees is used by the next
        one then: a tenth of a step with 100 MB of variables that travel. But several replicas in one process wait for
        each other there: a twentieth of a small step.

    Returns:
      Whether it was done: not if the environment has settings of its own, nor with a C library that has no `mallopt`.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # Any of the others would have glibc keep to its smallest threshold, so this one comes first.
    if mallopt is None or not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS):
        return False
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_TOP_PAD, _TOP_PAD)
    if few_arenas:
        mallopt(_M_ARENA_MAX, cpus.usable())
    return True
