# SPDX-License-Identifier: Apache-2.0
"""Results of a simulation: throughput, waits, drops, staleness, use of the links, and what limits the throughput."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tfdist.policies.base import Update

IN_FLIGHT, ACCEPTED, DROPPED, LOST = "in flight", "accepted", "dropped", "lost"


@dataclasses.dataclass(slots=True)
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
    outcome: str = IN_FLIGHT
    staleness: int = -1
    update: int = -1


# In the order of the starts.
GradientRecords = list[GradientRecord]
# Share of the time from which a link counts as full.
_FULL = 0.9


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Counts and times of a policy's gradients.

    Attributes:
      seconds: simulated time until the last update.
      updates: all updates, in order.
      gradients: record of each gradient, in the order of the starts.
      replicas: number of replicas.
      times: time of each update.
    """

    seconds: float
    updates: tuple[Update, ...]
    gradients: GradientRecords
    replicas: int
    times: Sequence[float] = ()

    @property
    def updates_per_sec(self) -> float:
        """Updates per simulated second."""
        return len(self.updates) / self.seconds if self.seconds else float("inf")

    @functools.cached_property
    def _counts(self) -> collections.Counter[tuple[str, int]]:
        return collections.Counter((gradient.outcome, gradient.replica) for gradient in self.gradients)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Number of each replica's gradients that entered an update."""
        return tuple(self._counts[ACCEPTED, replica] for replica in range(self.replicas))

    @property
    def dropped(self) -> tuple[int, ...]:
        """Number of each replica's gradients that were dropped."""
        return tuple(self._counts[DROPPED, replica] for replica in range(self.replicas))

    @property
    def lost(self) -> tuple[int, ...]:
        """Number of each replica's gradients that were lost with the replica."""
        return tuple(self._counts[LOST, replica] for replica in range(self.replicas))

    @functools.cached_property
    def staleness(self) -> dict[int, int]:
        """Number of applied gradients by staleness (global step - local step)."""
        counts = collections.Counter(age for update in self.updates for age in update.staleness)
        return dict(sorted(counts.items()))

    @functools.cached_property
    def mean_staleness(self) -> float:
        """Mean staleness of the applied gradients."""
        return sum(age * count for age, count in self.staleness.items()) / max(1, sum(self.staleness.values()))

    @functools.cached_property
    def wait_secs(self) -> float:
        """Time for which updates waited for gradients (`Update.wait_secs`)."""
        return sum(update.wait_secs for update in self.updates)


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """Use of one kind of link.

    Attributes:
      bytes_sent: bytes of all transfers.
      utilisation: share of the time for which the busiest of these links was full.
    """

    bytes_sent: float
    utilisation: float


@dataclasses.dataclass(frozen=True)
class Result(Simulation):
    """Result of `simulate`: `print` shows a table, `to_dict` returns JSON data.

    Attributes:
      strategy: name of the strategy.
      examples_per_gradient: examples in a gradient of one replica.
      policies: the policies, as text.
      examples_per_sec: examples of accepted gradients per second.
      single_examples_per_sec: the same of one device alone, without communication.
      efficiency: examples per second / those of all devices if each trained alone, by their speeds.
      computing_share: mean share of the replicas' time that they compute.
      transfer_share: mean share in which they fetch variables, and send gradients.
      held_share: mean share in which they wait: for an update, for the policy, or while they are lost.
      held_secs: time for which each replica was idle.
      updating_secs: time spent in updates: collectives, and the optimizer's step.
      links: use of the links, by name.
    """

    strategy: str = ""
    examples_per_gradient: int = 0
    policies: tuple[str, ...] = ()
    examples_per_sec: float = 0.0
    single_examples_per_sec: float = 0.0
    efficiency: float = 0.0
    computing_share: float = 0.0
    transfer_share: float = 0.0
    held_share: float = 0.0
    held_secs: tuple[float, ...] = ()
    updating_secs: float = 0.0
    links: dict[str, LinkUse] = dataclasses.field(default_factory=dict)

    @property
    def limit(self) -> str:
        """Limit of the throughput, in words."""
        computing, transfer, held = self.computing_share, self.transfer_share, self.held_share
        updating = min(self.updating_secs, self.seconds) / self.seconds if self.seconds else 0.0
        used = {name: use.utilisation for name, use in self.links.items()}
        fullest = max(used, key=used.__getitem__, default="")
        if used and used[fullest] >= _FULL:
            return f"the link {fullest} is full ({used[fullest]:.0%} busy)"
        if len(used) > 1 and sum(used.values()) >= _FULL:
            return f"the links {' and '.join(used)} are full in turn ({used[fullest]:.0%} busy each)"
        if computing >= 0.5:
            return f"computing: replicas compute {computing:.0%} of the time"
        if updating >= max(computing, transfer, held):
            return f"updates: collectives and the optimizer take {updating:.0%} of the time"
        if transfer >= held:
            return f"transfers: replicas fetch and send {transfer:.0%} of the time, and no link is full"
        return f"waiting: replicas wait {held:.0%} of the time for others"

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON data, without the gradients."""
        columns = {"updates", "gradients", "links", "times"}
        names = [field.name for field in dataclasses.fields(self) if field.name not in columns]
        names += ["accepted", "dropped", "limit", "lost", "mean_staleness", "staleness", "updates_per_sec", "wait_secs"]
        data = {name: getattr(self, name) for name in names}
        links = {name: dataclasses.asdict(link) for name, link in self.links.items()}
        return {**data, "links": links, "updates": len(self.updates)}

    def __str__(self) -> str:
        gradients = f"{sum(self.accepted):,} accepted, {sum(self.dropped):,} dropped, {sum(self.lost):,} lost"
        time = f"computing {self.computing_share:.1%}, transfers {self.transfer_share:.1%}, idle {self.held_share:.1%}"
        rows = [
            ("strategy", " + ".join((self.strategy, *self.policies))),
            ("updates", f"{len(self.updates):,} in {self.seconds:.4g} s: {self.updates_per_sec:.4g} updates/s"),
            (
                "examples",
                f"{self.examples_per_sec:,.4g} examples/s; one device alone {self.single_examples_per_sec:,.4g}",
            ),
            ("efficiency", f"{self.efficiency:.1%} of {self.replicas} replicas that train alone"),
            ("gradients", gradients),
            ("staleness", f"mean {self.mean_staleness:.3g}, at most {max(self.staleness, default=0)}"),
            ("time", time),
            *((name, f"{use.bytes_sent:,.4g} bytes, {use.utilisation:.1%} busy") for name, use in self.links.items()),
            ("limit", self.limit),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)
