# SPDX-License-Identifier: Apache-2.0
"""Rules for the exit codes of all tasks of an all-reduce job when one fails, so that Kubernetes counts one failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.launchers.requests import HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE

# Fails the Job of this pod regardless of its count of failures. It is no code of sysexits.h, and no signal.
GIVEN_UP_EXIT_CODE = 79
# SIGTERM ended a script without a handler: the pod was deleted, and Kubernetes knows the reason.
_ENDED_BY_SIGTERM = 143
PREEMPTIONS = (TRY_AGAIN_EXIT_CODE, _ENDED_BY_SIGTERM)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Decides the exit codes of all tasks from the first failure.

    Args:
      max_restarts: number of failures after which the job still restarts.
      max_preemptions: number of preemptions after which the job still restarts.
      peer_exit_code: exit code of a task after the failure of another; `TRY_AGAIN_EXIT_CODE` if each pod is counted.
      kinds: number of Kubernetes Jobs with these tasks; each has its own count of failures.
    """

    max_restarts: int
    max_preemptions: int
    peer_exit_code: int = TRY_AGAIN_EXIT_CODE
    kinds: int = 1

    def exit_codes(self, first: int | None, failures: int) -> tuple[int | None, int]:
        """Returns the exit code of the task that failed first (None for its script's own), and that of the others.

        Args:
          first: exit code of the script that failed first; None for a lost pod.
          failures: number of failures counted before, of all tasks.
        """
        if first in PREEMPTIONS:
            return None, TRY_AGAIN_EXIT_CODE
        if self.kinds > 1 and first in HOPELESS_EXIT_CODES:
            return None, GIVEN_UP_EXIT_CODE
        if self.kinds > 1 and first is not None and failures >= self.max_restarts:
            return GIVEN_UP_EXIT_CODE, GIVEN_UP_EXIT_CODE
        return None, self.peer_exit_code

    def are_preemptions_used_up(self, counts: Sequence[Counts]) -> bool:
        """Returns True if the job was preempted more than `max_preemptions` times."""
        restarts = max(each.failures + each.ignored for each in counts)
        return restarts - sum(each.failures for each in counts) > self.max_preemptions


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of earlier failures of a task's pods: those that Kubernetes counted, and those that it ignored."""

    failures: int = 0
    ignored: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The leader's decision about the end of one task.

    Attributes:
      exit_code: exit code of the task; None for its script's own.
      why: the cause, in words.
      hold_secs: time for the script to end by itself, for example to save its work after a preemption.
    """

    exit_code: int | None
    why: str = ""
    hold_secs: float = 0.0
