# SPDX-License-Identifier: Apache-2.0
"""When a task that has failed is started again alone, and when it is given up. No processes here, and no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from tfdist.launchers.requests import Restarts


class FailureRows:
    """Counts the failures in a row of each task.

    A failure of a task that had run for less than `settled_secs` belongs to its row; any other begins a new one.

    Args:
      settled_secs: see `Restarts`.
    """

    def __init__(self, settled_secs: float) -> None:
        self._settled_secs = settled_secs
        self._failures: dict[str, int] = {}

    def add(self, task: str, ran_secs: float) -> int:
        """Notes a failure of a task that had run for so long; returns the number of failures in its row."""
        before = self._failures.get(task, 0) if ran_secs < self._settled_secs else 0
        self._failures[task] = before + 1
        return before + 1


class Replacements:
    """Which tasks are to be started again alone, and when.

    The first time at once, then after `Restarts.pause_secs`; a task that has failed in a row more often than
    `max_worker_restarts` is given up.

    Args:
      restarts: the rule.
      clock: the time in seconds.
    """

    def __init__(self, restarts: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self._restarts = restarts
        self._rows = FailureRows(restarts.settled_secs)
        self._clock = clock
        self._due: dict[str, float] = {}

    def failed(self, task: str, ran_secs: float, least_secs: float = 0.0) -> tuple[int, float | None]:
        """Notes a failure.

        Args:
          task: its name.
          ran_secs: how long it had run.
          least_secs: time that has to pass before it is started again.

        Returns:
          How many failures in a row there are, and the seconds after which the task is due; None if it is given up.
        """
        failures = self._rows.add(task, ran_secs)
        if failures > self._restarts.max_worker_restarts:
            return failures, None
        pause_secs = self._restarts.pause_secs(failures - 1) if failures > 1 else 0.0
        self.postpone(task, max(pause_secs, least_secs))
        return failures, max(pause_secs, least_secs)

    def postpone(self, task: str, secs: float) -> None:
        """Makes a task due after so many seconds from now."""
        self._due[task] = self._clock() + secs

    def due(self) -> list[str]:
        """The tasks to start now, each once."""
        now = self._clock()
        names = [task for task, when in self._due.items() if when <= now]
        for name in names:
            del self._due[name]
        return names

    def wait_secs(self) -> float | None:
        """The time until the next task is due; None if there is none."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None
