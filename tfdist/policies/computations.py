# SPDX-License-Identifier: Apache-2.0
"""A gradient from its start until the policy knows what becomes of it."""

from __future__ import annotations

from typing import NamedTuple

from tfdist.policies.answers import Contribution, Outcome


class Computation(NamedTuple):
    """A gradient whose computation has started.

    Attributes:
      replica: index of the replica that computes it.
      local_step: the global step from whose variables it is computed.
      start: time of its start.
      held: see `Contribution`.
    """

    replica: int
    local_step: int
    start: float
    held: float

    def ended(self, time: float, step: int, outcome: Outcome, weight: float = 0.0) -> Contribution:
        """Returns its contribution: it arrived at `time`, or was withdrawn then; `step` is the global step now."""
        return Contribution(self.replica, self.start, time, outcome, step - self.local_step, weight, self.held)


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
