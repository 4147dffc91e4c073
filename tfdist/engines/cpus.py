# SPDX-License-Identifier: Apache-2.0
"""How many CPUs there are for this process."""

from __future__ import annotations

import os


def usable() -> int:
    """Those that it may run on; all of the host's where the system can't bind a process to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
