# SPDX-License-Identifier: Apache-2.0
"""Delays of the workers, and the speed that could be reached with them. No TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist import policies, testing
from tfdist.planning import simulation


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Delays of the workers, as sleeps: two cores carry eight slow workers.

    Attributes:
      name: as in the table.
      delays_by_worker: delays by worker, "*" for all others; empty for none.
    """

    name: str
    delays_by_worker: Mapping[str, testing.DelayDistribution] = dataclasses.field(default_factory=dict)

    def delays(self, seed: int) -> testing.Delays:
        """The delays of one segment."""
        return testing.Delays(self.delays_by_worker, seed)

    def limit(self, seed: int, spares: int, num_workers: int, num_updates: int) -> float:
        """Updates per second of `BackupWorkers(spares)` in this seed's segment, if nothing but the delays took time.

        Each segment starts its draws anew, all workers idle, and a delay depends on nothing but seed, worker and
        attempt. So this is the very same draw as the measured segment's, not a mean over others.
        """
        policy, secs = policies.BackupWorkers(spares=spares), self.delays(seed).secs
        return simulation.simulate_policy(policy, secs, num_updates, num_workers).updates_per_sec


class SegmentDelays(testing.Delays):
    """Delays whose attempts are counted from the start of the segment, not of the program."""

    def __init__(
        self, delays: testing.DelayDistribution | Mapping[str, testing.DelayDistribution], seed: int = 0
    ) -> None:
        super().__init__(delays, seed)
        self._first: dict[int, int] = {}

    def secs(self, replica: int, attempt: int) -> float:
        return super().secs(replica, attempt - self._first.setdefault(replica, attempt))


PLAIN = Scenario("")
LOGNORMAL = Scenario("lognormal", {"*": testing.lognormal(mean=0.2, s=1.0)})
PARETO = Scenario("pareto", {"*": testing.pareto(mean=0.2, a=2.0)})
STALLED = Scenario("10x", {"*": testing.constant(0.1), "worker:3": testing.constant(1.0)})
# Stands for the time that an accelerator computes, while the two cores are free.
EQUAL = Scenario("50 ms", {"*": testing.constant(0.05)})
