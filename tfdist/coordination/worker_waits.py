# SPDX-License-Identifier: Apache-2.0
"""Decides which waits of a worker for other workers can still end. Pure: no clock, thread, socket or TensorFlow.

A call that needs all workers ends late if a worker is slow. It never ends if a worker has ended, or if all wait, each
in another call. Each worker publishes its `WorkerStatus` while it waits; its `Waits` takes its own status and those of
the others (events in), and says what to publish and why a wait can't end (answers out).

    look    own status, time              ->  the status to publish, and whether the others are to be read
    hear    another's status
    reason  own status, tasks waited for  ->  why this wait can't end, or None
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

# A worker looks at the others once it has waited for so long.
LOOK_AFTER_SECS = 2.0
# All workers must wait for so long, each in another call, before this counts as a deadlock.
PARTED_SECS = 5.0
# For so long a wait that can't end stays published, so that others, which look later, end theirs.
SHOWN_SECS = 3.0
# A status that was not renewed for so many looks is of a worker that hangs.
_FRESH_LOOKS = 4
HAS_ENDED = "has ended"
# A call that is known by no name.
A_SUM = "a sum over all workers"
A_VARIABLE = "tf.Variable (its first value)"
_APART = "all workers wait, each in another call"
# The message of `parted`, in that of another error.
PARTED = re.compile(rf"{_APART}: [^\n\"\\]+")
# Second half of the message of `never`, in that of another error.
_CAUSE = re.compile(r"as some have ended or failed: (.+)")
_REMEDY = (
    "every worker must make the same models, calls and steps, in the same order, with the same callbacks: remove the "
    "`if` around what only some do, and set model.stop_training in the same step on all of them"
)
# Cause of a lost worker whose connection is gone.
LOST = (
    "the connection to it is lost: its process was killed or stopped, or its machine has failed; look at its output "
    "and its memory, and go on from a checkpoint with tfdist.callbacks.Resume"
)
# Parts of a call of Keras.
STEP, OUTSIDE = "a step", "outside of its steps, as by metric.result()"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """State of one worker.

    Attributes:
      task: its name, such as "worker:1".
      call: the call of the user's that it is in, such as "model.fit"; "" outside of the calls that tfdist knows.
      what: the part of the call that it waits for, such as "comparing the data sets"; "" for a collective.
      number: the number of the exchange that it waits for; 0 for no numbered exchange.
      blocked_secs: for how long it has waited for other workers without progress; 0 if it does not wait.
      ended: how its program has ended; "" if it has not.
      part: of a collective, `step_of` or `OUTSIDE`: whether it is in a step of that call; "" if it is not known.
    """

    task: str
    call: str = ""
    what: str = ""
    number: int = 0
    blocked_secs: float = 0.0
    ended: str = ""
    part: str = ""

    @property
    def place(self) -> tuple[int, str]:
        """Equal on workers that wait for the same thing."""
        return (self.number, self.what) if self.what else (0, self.call)

    @property
    def doing(self) -> str:
        """Name of the worker's call, for messages."""
        part = self.what or self.part
        return f"{self.call} ({part})" if self.call and part else self.call or self.what

    def to_json(self) -> str:
        """Returns the status as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerStatus:
        """Returns the status from text."""
        return cls(**json.loads(text))


class Waits:
    """The waits of one worker.

    Args:
      others: names of the other workers.
    """

    def __init__(self, others: Sequence[str]) -> None:
        self._others = {other: WorkerStatus(other) for other in others}
        # The look at which the status of another was new; the first one of a wait may be old.
        self._new_at: dict[str, int] = {}
        self._looks = 0
        self._is_shown, self._shown_until = False, 0.0

    def look(self, own: WorkerStatus, now: float) -> tuple[WorkerStatus | None, bool]:
        """Takes the current status of this worker at the time `now`, in seconds; called about once a second.

        Returns:
          The status to publish, if any, and True if this worker waits: then the others are to be heard.
        """
        if own.blocked_secs >= LOOK_AFTER_SECS:
            self._looks += 1
            self._is_shown = True
            return own, True
        self._new_at.clear()
        if not self._is_shown or now < self._shown_until:
            return None, False
        self._is_shown = False
        return dataclasses.replace(own, blocked_secs=0.0), False

    def hear(self, status: WorkerStatus) -> None:
        """Takes the last status that another worker has published."""
        if status.task not in self._new_at:
            self._new_at[status.task] = self._looks - _FRESH_LOOKS
        elif status != self._others[status.task]:
            self._new_at[status.task] = self._looks
        self._others[status.task] = status

    def reason(self, own: WorkerStatus, awaited: Sequence[str]) -> str | None:
        """Returns why the wait of this worker for the tasks `awaited` can't end, in one line; None if it may end."""
        others = [self._current(each) for each in self._others.values()]
        ended = {each.task: each.ended for each in others if each.ended and each.task in awaited}
        if failed := {task: how for task, how in ended.items() if how != HAS_ENDED}:
            return never(own, failed)
        if ended:
            return f"{own.doing or A_SUM} on {own.task} waits for {' and '.join(ended)}, which ended; {_REMEDY}"
        # A worker that has ended, and is not awaited, makes no call any more that could end the waits of the others.
        living = [own, *(each for each in others if not each.ended)]
        if any(each.blocked_secs < PARTED_SECS for each in living) or _are_together(living):
            return None
        return parted({each.task: each.doing for each in living})

    def failed(self, now: float) -> None:
        """Notes that a wait has failed, from `reason` or of a lost worker."""
        self._shown_until = now + SHOWN_SECS

    def _current(self, status: WorkerStatus) -> WorkerStatus:
        is_fresh = self._looks - self._new_at.get(status.task, -_FRESH_LOOKS) < _FRESH_LOOKS
        return status if is_fresh or status.ended else dataclasses.replace(status, blocked_secs=0.0)


def _are_together(states: Sequence[WorkerStatus]) -> bool:
    if len({state.place for state in states}) > 1:
        return False
    # Of a step whose collectives are not known, it may be any of them.
    parts = {state.part for state in states if state.part}
    steps = {part for part in parts if part != OUTSIDE}
    return bool(states[0].what) or len(parts) < 2 or (OUTSIDE not in parts and len(steps - {STEP}) < 2)


def step_of(collectives: str) -> str:
    """Returns `WorkerStatus.part` of a step with these collectives, such as "2 sums"; for "", with unknown ones."""
    return f"{STEP} of {collectives}" if collectives else STEP


def mismatch(own: WorkerStatus) -> str:
    """Returns the message for a collective for which another worker came with another one."""
    doing = own.doing or A_SUM
    return f"{doing} on {own.task}: the workers came to different collectives at the same time; {_REMEDY}"


def never(own: WorkerStatus, reasons: Mapping[str, str]) -> str:
    """Returns the message for a wait for tasks that have ended or failed; `reasons` are by task."""
    wait = f"{own.doing} will never end" if own.what else "a sum over all workers will never come"
    # A worker that has failed because of another one shows that one.
    shown = [found[1] if (found := _CAUSE.search(text)) else f"{task} ({text})" for task, text in reasons.items()]
    return f"{wait}, as some have ended or failed: {'; '.join(dict.fromkeys(shown))}"


def parted(calls: Mapping[str, str]) -> str:
    """Returns the message for workers that wait for each other in different calls, which are given by task."""
    groups = collections.defaultdict(list)
    for task, call in sorted(calls.items()):
        groups[call or "a call outside of Keras"].append(task)
    shown = ", and ".join(f"{' and '.join(tasks)} in {call}" for call, tasks in groups.items())
    return f"{_APART}: {shown}; {_REMEDY}"
