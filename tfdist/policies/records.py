# SPDX-License-Identifier: Apache-2.0
"""Values that an aggregation policy returns: `Arrival` for one gradient, `Update` for one update of the variables."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Answer to `Policy.arrived`.

    Attributes:
      accepted: whether the gradient enters the update.
      staleness: global step - local step.
      weight: factor for the gradient, as far as it is known at arrival; 0.0 for a dropped gradient.
      number: index of this gradient among all accepted gradients, from 0; -1 for a dropped gradient.
    """

    accepted: bool
    staleness: int
    weight: float
    number: int = -1


class Outcome(enum.IntEnum):
    """Outcome of a gradient."""

    ACCEPTED = 0  # it entered the update
    DROPPED = 1  # the policy dropped it, or the engine withdrew it: at the end of the data, or after an error
    LOST = 2  # its replica was lost


class Contribution(NamedTuple):
    """A gradient that was started, and what became of it. A tuple, because one is made for each gradient.

    Times are seconds on the clock of whoever made it; in an update log, on that of the log.

    Attributes:
      replica: index of the replica that computed it; in an update log, into the header's `workers`.
      start: time at which its computation started.
      arrival: time at which it arrived; if it never did, at which it was withdrawn or its replica was lost.
      outcome: what became of it.
      staleness: global step - local step, when it was applied or dropped.
      weight: factor with which it entered the update; 0.0 if it didn't.
      held: seconds for which the replica had to wait before this start, after it had delivered its last gradient.
      input: seconds from `start` in which it waited for its batch, where that is measured.
    """

    replica: int
    start: float
    arrival: float
    outcome: Outcome = Outcome.ACCEPTED
    staleness: int = 0
    weight: float = 1.0
    held: float = 0.0
    input: float = 0.0


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the policy's settings, such as another number of spares, as one line for the log."""

    text: str


@dataclasses.dataclass(frozen=True)
class Update:
    """Answer to `Policy.updated`: the gradients of the update, and its statistics.

    Attributes:
      step: the global step after this update.
      contributors: replicas, in the order in which their gradients arrived.
      dropped: replicas of the dropped gradients in `contributions`, in order. A replica may appear twice.
      staleness: staleness of each contributor's gradient, in the same order.
      wait_secs: from the opening of this step until enough gradients had arrived; 0 if they had arrived before. A step
        opens when Keras asks for it (`Aggregation.opened`), else at the previous update.
      spread_secs: from the first to the last gradient of this update.
      changes: changes of the policy's settings since the previous update.
      weights: factor of each contributor's gradient, in the same order.
      numbers: `Arrival.number` of each contributor's gradient, in the same order.
      contributions: the gradients that were accepted, dropped or lost since the previous update, with the times of
        their start and arrival. The accepted ones are last, in the order of `contributors`.
      time: time at which the update was made, on the clock of the contributions.
      opened_secs: from the opening of the step to the update.
    """

    step: int
    contributors: tuple[int, ...]
    dropped: tuple[int, ...]
    staleness: tuple[int, ...]
    wait_secs: float
    spread_secs: float
    changes: tuple[Change, ...]
    weights: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    time: float = 0.0
    opened_secs: float = 0.0


# A gradient from its start until the policy knows what becomes of it.


class Computation(NamedTuple):
    """A gradient whose computation has started.

    Attributes:
      replica: index of the replica that computes it.
      local_step: the global step from whose variables it is computed.
      start: time of its start.
      held, input: see `Contribution`.
    """

    replica: int
    local_step: int
    start: float
    held: float
    input: float = 0.0

    def ended(self, time: float, step: int, outcome: Outcome, weight: float = 0.0) -> Contribution:
        """Returns its contribution: it arrived at `time`, or was withdrawn then; `step` is the global step now."""
        staleness = step - self.local_step
        return Contribution(self.replica, self.start, time, outcome, staleness, weight, self.held, self.input)


class Delivered(NamedTuple):
    """An accepted gradient that waits for its update. In order, the oldest is the first.

    Attributes:
      local_step: the global step from whose variables it was computed.
      number: its number among all accepted ones.
      computation: its computation.
      time: its time of arrival.
    """

    local_step: int
    number: int
    computation: Computation
    time: float

    @property
    def replica(self) -> int:
        """Index of the replica that computed it."""
        return self.computation.replica

    def ended(self, step: int, outcome: Outcome, weight: float = 0.0) -> Contribution:
        """Returns its contribution; `step` is the global step now."""
        return self.computation.ended(self.time, step, outcome, weight)
