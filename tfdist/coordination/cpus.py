# SPDX-License-Identifier: Apache-2.0
"""CPUs that this process may use, and the time for which they were busy."""

from __future__ import annotations

import contextlib
import os
import threading

# Columns of /proc/stat: user, nice, system, irq, softirq, and steal, which is the time of other virtual machines.
_BUSY = (1, 2, 3, 6, 7, 8)


def usable() -> int:
    """Returns the number of CPUs that this process may run on; all of the host's where there is no CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def runnable_threads() -> int:
    """Returns the number of other threads of this process that run or wait for a CPU; 0 where there is no /proc."""
    own, count = str(threading.get_native_id()), 0
    try:
        names = os.listdir("/proc/self/task")  # noqa: PTH208 - the shortest way, many times
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/stat", "rb") as file:  # noqa: PTH123
            # The name of a thread is in brackets, and may have spaces and brackets itself.
            count += name != own and file.read().rpartition(b")")[2].split()[0] == b"R"
    return count
