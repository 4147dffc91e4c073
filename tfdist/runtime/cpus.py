# SPDX-License-Identifier: Apache-2.0
"""Number of CPUs that this process may use."""

from __future__ import annotations

import os


def usable() -> int:
    """Returns the number of CPUs that this process may run on; all of the host's where there is no CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
