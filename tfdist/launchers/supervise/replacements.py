# SPDX-License-Identifier: Apache-2.0
"""Schedule of the restarts of single failed tasks, and the limit of their failures. Starts no process, never waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from tfdist.launchers.requests import Restarts


class FailureRows:
    """Counts the failures in a row of each task.

    A failure after a run of at least `settled_secs` begins a new row.

    Args:
      settled_secs: see `Restarts`.
    """

    def __init__(self, settled_secs: float) -> None:
        self._settled_secs = settled_secs
        self._failures: dict[str, int] = {}

    def add(self, task: str, ran_secs: float) -> int:
        """Counts a failure of a task that ran for `ran_secs`; returns the number of its failures in a row."""
        before = self._failures.get(task, 0) if ran_secs < self._settled_secs else 0
        self._failures[task] = before + 1
        return before + 1


class Replacements:
    """Schedule of tasks that are started again alone.

    A task restarts at once after its first failure, and after `Restarts.pause_secs` from the second on. After more than
    `max_worker_restarts` failures in a row it is given up.

    Args:
      restarts: limits of restarts.
      clock: returns the time in seconds.
    """

    def __init__(self, restarts: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self._restarts = restarts
        self._rows = FailureRows(restarts.settled_secs)
        self._clock = clock
        self._due: dict[str, float] = {}

    def failed(self, task: str, ran_secs: float, least_secs: float = 0.0) -> tuple[int, float | None]:
        """Counts a failure of a task that ran for `ran_secs`; schedules its restart, in `least_secs` at the earliest.

        Returns:
          The number of failures in a row, and the seconds until the restart; None if the task is given up.
        """
        failures = self._rows.add(task, ran_secs)
        if failures > self._restarts.max_worker_restarts:
            return failures, None
        pause_secs = self._restarts.pause_secs(failures - 1) if failures > 1 else 0.0
        self.postpone(task, max(pause_secs, least_secs))
        return failures, max(pause_secs, least_secs)

    def postpone(self, task: str, secs: float) -> None:
        """Schedules the restart of a task in `secs` seconds from now."""
        self._due[task] = self._clock() + secs

    def due(self) -> list[str]:
        """Returns the tasks to start now, each once."""
        now = self._clock()
        names = [task for task, when in self._due.items() if when <= now]
        for name in names:
            del self._due[name]
        return names

    def wait_secs(self) -> float | None:
        """Returns the time until the next restart; None if none is scheduled."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None
