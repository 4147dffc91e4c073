# SPDX-License-Identifier: Apache-2.0
"""Record of every simulated gradient, in columns: a cluster of thousands of workers makes millions of them."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterator

IN_FLIGHT, ACCEPTED, DROPPED, LOST = range(4)
OUTCOMES = ("in flight", "accepted", "dropped", "lost")


@dataclasses.dataclass(frozen=True)
class GradientRecord:
    """One gradient.

    Attributes:
      replica: index of the replica.
      started: time at which the replica began to fetch variables, or to compute if it fetches none.
      received: time at which it began to compute.
      computed: time at which it had computed, and began to send.
      arrived: time at which the policy decided about it, or at which it was lost.
      local_step: global step of its variables.
      outcome: "accepted", "dropped", "lost" with its replica, or "in flight" at the end.
      staleness: when it was applied or dropped; -1 for others.
      update: global step after the update that it entered; -1 for others.
    """

    replica: int
    started: float
    received: float
    computed: float
    arrived: float
    local_step: int
    outcome: str
    staleness: int
    update: int


class GradientRecords:
    """A sequence of `GradientRecord`, in the order of the starts. The columns are arrays."""

    def __init__(self) -> None:
        self.replica = array.array("i")
        self.started = array.array("d")
        self.received = array.array("d")
        self.computed = array.array("d")
        self.arrived = array.array("d")
        self.local_step = array.array("i")
        self.outcome = array.array("b")
        self.staleness = array.array("i")
        self.update = array.array("i")

    def add(self, replica: int, time: float, local_step: int) -> int:
        """Adds a gradient that starts now; returns its index."""
        self.replica.append(replica)
        self.started.append(time)
        self.received.append(time)
        self.computed.append(time)
        self.arrived.append(time)
        self.local_step.append(local_step)
        self.outcome.append(IN_FLIGHT)
        self.staleness.append(-1)
        self.update.append(-1)
        return len(self.replica) - 1

    def __len__(self) -> int:
        return len(self.replica)

    def __getitem__(self, index: int) -> GradientRecord:
        return GradientRecord(
            self.replica[index],
            self.started[index],
            self.received[index],
            self.computed[index],
            self.arrived[index],
            self.local_step[index],
            OUTCOMES[self.outcome[index]],
            self.staleness[index],
            self.update[index],
        )

    def __iter__(self) -> Iterator[GradientRecord]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientRecords) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]
