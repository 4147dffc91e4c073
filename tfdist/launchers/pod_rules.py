# SPDX-License-Identifier: Apache-2.0
"""Decides how all tasks of an all-reduce job end when one of them fails, so that Kubernetes counts one failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.launchers.requests import HOPELESS_EXIT_CODES, PREEMPTED_EXIT_CODE

# Fails the Job of this pod, where its own count of failures would not: no code of sysexits.h, and no signal.
GIVEN_UP_EXIT_CODE = 79
# SIGTERM ended a script that has no handler: somebody wanted the pod gone, and Kubernetes knows why.
_ENDED_BY_SIGTERM = 143
PREEMPTIONS = (PREEMPTED_EXIT_CODE, _ENDED_BY_SIGTERM)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Decides the exit codes of all tasks from the first failure.

    Args:
      max_restarts: failures after which the job starts again.
      max_preemptions: preemptions after which the job starts again.
      peer_exit_code: ends a task after the failure of another. `PREEMPTED_EXIT_CODE` where every pod is counted.
      kinds: number of Jobs to which the tasks belong; each has its own count of failures.
    """

    max_restarts: int
    max_preemptions: int
    peer_exit_code: int = PREEMPTED_EXIT_CODE
    kinds: int = 1

    def exit_codes(self, first: int | None, failures: int) -> tuple[int | None, int]:
        """The exit code of the task that failed first, None for its own, and that of the others.

        Args:
          first: exit code of the script that failed first; None where the pod is lost.
          failures: that were counted before, of all tasks.
        """
        if first in PREEMPTIONS:
            return None, PREEMPTED_EXIT_CODE
        if self.kinds > 1 and first in HOPELESS_EXIT_CODES:
            return None, GIVEN_UP_EXIT_CODE
        if self.kinds > 1 and first is not None and failures >= self.max_restarts:
            return GIVEN_UP_EXIT_CODE, GIVEN_UP_EXIT_CODE
        return None, self.peer_exit_code

    def are_preemptions_used_up(self, counts: Sequence[Counts]) -> bool:
        """Whether the job was preempted more often than it may be. All tasks start again each time."""
        restarts = max(each.failures + each.ignored for each in counts)
        return restarts - sum(each.failures for each in counts) > self.max_preemptions


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often the pods of a task have failed before: counted by Kubernetes, and ignored by it."""

    failures: int = 0
    ignored: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The end of an attempt, as one task hears it.

    Attributes:
      exit_code: of the task; None for its script's own.
      why: the cause, in words.
      hold_secs: given to the script to end by itself, as where all of them save after a preemption.
    """

    exit_code: int | None
    why: str = ""
    hold_secs: float = 0.0
