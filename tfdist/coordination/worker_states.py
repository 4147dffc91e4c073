# SPDX-License-Identifier: Apache-2.0
"""States of workers that wait for each other, and the decision whether a wait can still end. No TensorFlow import.

A call that needs all workers ends late if a worker is slow. It never ends if a worker has ended, or if all wait, each
in another call. Each worker publishes its `WorkerStatus` while it waits; `verdict` tells these cases apart.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

# All workers must wait for so long, each in another call, before this counts as a deadlock.
PARTED_SECS = 5.0
HAS_ENDED = "has ended"
# A call that is known by no name.
A_SUM = "a sum over all workers"
A_VARIABLE = "tf.Variable (its first value)"
_APART = "all workers wait, each in another call"
# The message of `parted`, in that of another error.
PARTED = re.compile(rf"{_APART}: [^\n\"\\]+")
# Second half of the message of `never`, and of another error.
_CAUSE = re.compile(r"as some have ended or failed: (.+)")
_SAME = "the same number of steps, and set model.stop_training in the same step on all of them"
# Cause of a lost worker whose connection is gone.
LOST = (
    "the connection to it is lost: its process was killed or stopped, or its machine has failed; look at its output "
    "and its memory, and go on from a checkpoint with tfdist.callbacks.Resume"
)
# Parts of a call of Keras.
STEP, OUTSIDE = "a step", "outside of its steps"


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """State of one worker.

    Attributes:
      task: its name, such as "worker:1".
      call: the call of the user's that it is in, such as "model.fit"; "" outside of the calls that tfdist knows.
      what: the part of the call that it waits for, such as "comparing the data sets"; "" for a collective.
      number: the number of the exchange that it waits for; 0 for no numbered exchange.
      blocked_secs: for how long it has waited for other workers without progress; 0 if it does not wait.
      log: its last numbered exchanges.
      ended: how its program has ended, and why if the workers had parted; "" if it has not.
      part: of a collective, `step_of` or `OUTSIDE`: whether it is in a step of that call; "" if it is not known.
    """

    task: str
    call: str = ""
    what: str = ""
    number: int = 0
    blocked_secs: float = 0.0
    log: Mapping[int, str] = dataclasses.field(default_factory=dict)
    ended: str = ""
    part: str = ""

    @property
    def place(self) -> tuple[int, str]:
        """Equal on workers that wait for the same thing."""
        return (self.number, self.what) if self.what else (0, self.call)

    @property
    def doing(self) -> str:
        """Name of the worker's call, for messages."""
        return f"{self.call} ({self.what})" if self.call and self.what else self.call or self.what

    @property
    def doing_in_part(self) -> str:
        """Name of the worker's call, and of the part of it, for messages."""
        return f"{self.call} ({self.part})" if self.call and self.part and not self.what else self.doing

    def to_json(self) -> str:
        """Returns the state as text, without the task's name."""
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items() if name != "task"})

    @classmethod
    def from_json(cls, task: str, text: str) -> WorkerStatus:
        """Returns the state of a task from text."""
        fields = json.loads(text)
        return cls(task, **{**fields, "log": {int(number): what for number, what in fields["log"].items()}})


def verdict(own: WorkerStatus, others: Sequence[WorkerStatus], awaited: Sequence[str], known: str = "") -> str | None:
    """Returns why this worker's wait can't end, in one line; None if it may end.

    Args:
      own: state of this worker, which waits.
      others: current states of the others, as far as they are known.
      awaited: names of the tasks that this worker waits for.
      known: why an earlier wait of this worker could not end; "" if there is none.
    """
    ended = [state for state in others if state.ended and state.task in awaited]
    # That the workers parted is the cause, of which the end of the one that saw it first is a consequence.
    causes = [cause.group() for state in ended if (cause := PARTED.search(state.ended))]
    if causes and causes[0] != known:
        return causes[0]
    if ended:
        return _of_ended(own, ended)
    # Who has ended, and is not awaited, makes no call any more that could end the waits of the others.
    states = [own, *(state for state in others if not state.ended)]
    if any(state.blocked_secs < PARTED_SECS for state in states) or _are_together(states):
        return None
    return _of_parted(states)


def _are_together(states: Sequence[WorkerStatus]) -> bool:
    if len({state.place for state in states}) > 1:
        return False
    # Of a step whose collectives are not known, it may be any of them.
    parts = {state.part for state in states if state.part}
    steps = {part for part in parts if part != OUTSIDE}
    return bool(states[0].what) or len(parts) < 2 or (OUTSIDE not in parts and len(steps - {STEP}) < 2)


def ended_by(how: str, reason: str) -> str:
    """Returns `WorkerStatus.ended` of a program that has ended with `how` after its last wait could not end."""
    return f"{how}: {reason}" if PARTED.match(reason) and not PARTED.search(how) else how


def step_of(collectives: str) -> str:
    """Returns `WorkerStatus.part` of a step with these collectives, such as "2 sums"; for "", with unknown ones."""
    return f"{STEP} of {collectives}" if collectives else STEP


def mismatch(own: WorkerStatus) -> str:
    """Returns the message for a collective for which another worker came with another one."""
    return (
        f"{own.doing or A_SUM} on {own.task}: the workers came to different collectives at the same time; every worker "
        "must make the same models, variables and calls, in the same order: remove the `if` around what only some do, "
        f"and give all workers {_SAME}"
    )


def never(own: WorkerStatus, reasons: Mapping[str, str]) -> str:
    """Returns the message for a wait for tasks that have ended or failed; `reasons` are by task."""
    wait = f"{own.doing} will never end" if own.what else "a sum over all workers will never come"
    # A worker that has failed because of another one shows that one.
    shown = [found[1] if (found := _CAUSE.search(text)) else f"{task} ({text})" for task, text in reasons.items()]
    return f"{wait}, as some have ended or failed: {'; '.join(dict.fromkeys(shown))}"


def _of_ended(own: WorkerStatus, ended: Sequence[WorkerStatus]) -> str:
    failed = {state.task: state.ended for state in ended if not state.ended.startswith(HAS_ENDED)}
    if failed:
        return never(own, failed)
    names = " and ".join(state.task for state in ended)
    verb = "has ended" if len(ended) == 1 else "have ended"
    doing = own.doing or A_SUM
    return f"{doing} on {own.task} waits for {names}, which {verb}; {_remedy(own.call or doing)}"


def _of_parted(states: Sequence[WorkerStatus]) -> str:
    """Message for workers that wait in different calls, or parts of one: by their first exchange that differs."""
    if len({state.place for state in states}) == 1:
        return parted({state.task: state.doing_in_part for state in states})
    common = set.intersection(*(set(state.log) for state in states))
    differing = [number for number in sorted(common) if len({state.log[number] for state in states}) > 1]
    if differing:
        return parted({state.task: state.log[differing[0]] for state in states})
    return parted({state.task: state.doing for state in states})


def parted(calls: Mapping[str, str]) -> str:
    """Returns the message for workers that wait for each other in different calls, which are given by task."""
    groups = collections.defaultdict(list)
    for task, call in sorted(calls.items()):
        groups[call or "a call outside of Keras"].append(task)
    shown = ", and ".join(f"{' and '.join(tasks)} in {call}" for call, tasks in groups.items())
    # Most often one worker alone makes a call, and seldom it is fit.
    fewest = min(groups, key=lambda call: (len(groups[call]), call.startswith("model.fit")))
    if all(f" ({STEP}" in call for call in groups):
        remedy = "every worker must make the same step: remove the `if` around what only some do in it"
    elif len({call.partition(" (")[0] for call in groups}) == 1:
        remedy = f"give all workers {_SAME}"
    else:
        remedy = _remedy(fewest)
    return f"{_APART}: {shown}; {remedy}"


def _remedy(call: str) -> str:
    # Without the part of the call that is in parentheses.
    special = {A_SUM: "take part", A_VARIABLE.partition(" (")[0]: "make the same models and variables"}
    call = call.partition(" (")[0]
    needed = special.get(call) or (f"have {call}" if call.startswith("the callback") else f"call {call}")
    return f"every worker must {needed}: remove the `if` around it, and give all workers {_SAME}"
