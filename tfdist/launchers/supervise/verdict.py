# SPDX-License-Identifier: Apache-2.0
"""Decides which task of a job failed first. Pure: no clock, process or thread; the supervisors feed it.

The end of a task is no proof that its failure came first. A preempted task ends with `TRY_AGAIN_EXIT_CODE`, and so does
a worker that has lost its chief. A task that raised first may be slow to exit, while its peers fail within milliseconds
because they miss it. So after some ends there is a wait for the cause:

| first end | waits | for |
|---|---|---|
| `TRY_AGAIN_EXIT_CODE`, or for want of another task | `CAUSE_SECS` | a task that fails otherwise |
| of a task that does not decide the job's result | `LEAST_SECS` | one that does |
| while another task has raised before this one | `CAUSE_SECS` | the end of that task |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE

# A task that has lost a peer often ends before it: the wait for that peer. A chief that has raised stays for 3 s, so
# that others read why, and has 3 s to end.
CAUSE_SECS = 6.5
# A worker or ps that has lost the chief may fail before the launcher sees the end of the chief.
LEAST_SECS = 1.0
# Exit code of Python after an exception, and the longest time from its traceback to the end of the process. A traceback
# before that was printed for an exception that was caught.
_RAISED_EXIT_CODE = 1
_RAISED_SECS = 60.0


@dataclasses.dataclass(frozen=True)
class TaskFailure:
    """Failure of a task.

    Attributes:
      task: name of the task.
      code: its exit code; None for a task that was lost.
      began_secs: time at which it began to fail: its last traceback, or its end.
      is_consequence: True if it says itself that it lacks another task.
    """

    task: str
    code: int | None
    began_secs: float
    is_consequence: bool = False


class FirstFailure:
    """The first failure of a job, as far as it is known. Successes are not reported to it.

    Attributes:
      failure: the first failure; None before any.
      deadline_secs: time until which another task may turn out to be the cause; infinite before any failure.
    """

    def __init__(self) -> None:
        self.failure: TaskFailure | None = None
        self.deadline_secs = math.inf

    def ended(
        self,
        task: str,
        code: int | None,
        now_secs: float,
        *,
        decides: bool = True,
        raised_secs: Mapping[str, float] | None = None,
        is_consequence: bool = False,
    ) -> None:
        """Notes the failure of a task.

        Args:
          task: name of the task that ended.
          code: exit code, not 0; None for a task that was lost.
          now_secs: time of its end.
          decides: True if its failure decides the result of the job.
          raised_secs: times of the tracebacks of tasks, this one's and those of tasks that have not ended.
          is_consequence: see `TaskFailure`.
        """
        raised = {each: secs for each, secs in (raised_secs or {}).items() if now_secs - secs <= _RAISED_SECS}
        raised_here = raised.pop(task, now_secs)
        new = TaskFailure(task, code, raised_here if code == _RAISED_EXIT_CODE else now_secs, is_consequence)
        first = self.failure
        is_late = first is not None and not _is_cause(new, first)
        self.failure = cause = first if first is not None and is_late else new
        # Preempted tasks end one after the other, the one that saves last.
        is_known = not cause.is_consequence and cause.code != TRY_AGAIN_EXIT_CODE
        if not is_known or any(secs < cause.began_secs for secs in raised.values()):
            secs = math.inf if is_late else CAUSE_SECS
        else:
            secs = 0.0 if decides else LEAST_SECS
        self.deadline_secs = min(self.deadline_secs, now_secs + secs) if is_late else now_secs + secs

    def is_decided(self, now_secs: float) -> bool:
        """Returns True if no other task can be the cause any more."""
        return now_secs >= self.deadline_secs


def _is_cause(new: TaskFailure, first: TaskFailure) -> bool:
    """Returns True if the failure that ended later began first."""
    if TRY_AGAIN_EXIT_CODE in (new.code, first.code):
        return new.code != first.code == TRY_AGAIN_EXIT_CODE
    if new.is_consequence != first.is_consequence:
        return first.is_consequence
    return new.began_secs < first.began_secs
