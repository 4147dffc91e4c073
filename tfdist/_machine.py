# SPDX-License-Identifier: Apache-2.0
"""CPUs, memory and environment of this process, and settings of its allocators. No TensorFlow import.

TensorFlow allocates the tensors of a step with the C library's `malloc`, and frees them in the same step. glibc returns
large blocks to the kernel at once. The next step gets them again, page by page and zeroed. With 25 million parameters
that is 400 MB, and 100,000 page faults, in each step of `MultiWorkerMirroredStrategy`.

With these settings a process stays about as large as its peak, or larger, because each arena of glibc keeps its own
peak. Blocks beyond 64 MiB are kept for the main thread alone: those of tensors come from TensorFlow's own allocator,
that of hosts of GPUs, which all threads share. The threads of gRPC allocate large messages, too. So the number of
arenas can be limited to the number of CPUs; glibc's default is eight times as many.

Settings in the environment (the MALLOC_ variables of mallopt(3), or GLIBC_TUNABLES) take precedence: with one of them
nothing is changed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

# Columns of /proc/stat: user, nice, system, irq, softirq, and steal, which is the time of other virtual machines.
_BUSY = (1, 2, 3, 6, 7, 8)
# Set for every task that a launcher starts.
_LAUNCHER = "TFDIST_LAUNCHER"
# <malloc.h>, which Python has no names for; they are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
# Blocks of at least this size, such as a data set in memory, return to the kernel when they are freed. Before 2.35
# glibc accepts no more than half the size of a thread's heap.
_MMAP_THRESHOLDS = (1 << 30, 32 << 20)
# Read by TensorFlow when it makes its devices (`ProcessState::GetCPUAllocator`). The limit would be 64 GB.
_TENSORFLOW, _TENSORFLOW_MB = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"
# As large as the heap of a thread, so that a heap without any used block is kept.
_TOP_PAD = 64 << 20


def usable_cpus() -> int:
    """Returns the number of CPUs that this process may run on; all of the host's where there is no CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Within this block these environment variables have these values; None for one that is not set."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def busy_secs() -> float | None:
    """Returns the CPU time of all programs on the CPUs of this process since the boot; None if it is unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123 - the shortest way, many times
            rows = [row for row in map(str.split, file) if row and row[0] in names]
        ticks = sum(int(row[column]) for row in rows for column in _BUSY)
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if len(rows) == len(names) else None


def keep_if_launched(few_arenas: bool) -> None:
    """Calls `keep_freed_memory` in a process that a launcher of tfdist has started, which only trains.

    Its tensors are of TensorFlow's allocator then, unless there are devices. Servers don't: it takes twice as much.
    """
    if os.environ.get(_LAUNCHER) and keep_freed_memory(few_arenas):
        os.environ.setdefault(_TENSORFLOW, "true")
        os.environ.setdefault(_TENSORFLOW_MB, str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20))


def keep_freed_memory(few_arenas: bool = True) -> bool:
    """Sets `malloc` of this process, for good, to keep freed memory: steps of large models are up to 20 % faster.

    Processes that `tfdist launch` starts, and the workers and parameter servers of an embedded cluster, call it by
    themselves. Elsewhere, call it at the top of a program that only trains; it is not for notebooks or servers.

    Args:
      few_arenas: True to limit the arenas of `malloc` to the number of CPUs. Threads then reuse each other's freed
        memory, which saves a tenth of a step that sends 100 MB of variables. But several replicas in one process wait
        for each other's arenas, which costs a twentieth of a small step.

    Returns:
      True if it was set; False if the environment has settings of its own, or the C library has no `mallopt`.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    # First, because setting any other option fixes the mmap threshold at its smallest value.
    if mallopt is None or not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS):
        return False
    mallopt(_M_TRIM_THRESHOLD, -1)
    mallopt(_M_TOP_PAD, _TOP_PAD)
    if few_arenas:
        mallopt(_M_ARENA_MAX, usable_cpus())
    return True
