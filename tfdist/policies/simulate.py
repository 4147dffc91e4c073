# SPDX-License-Identifier: Apache-2.0
"""Event-by-event simulation of a policy with zero overhead: an upper limit for the engines' throughput."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable

from tfdist.policies import base


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Result of `simulate`.

    Attributes:
      seconds: simulated time until the last update.
      accepted: number of accepted gradients of each replica.
      dropped: number of dropped gradients of each replica.
      updates: all updates, in order.
    """

    seconds: float
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    updates: tuple[base.Update, ...]

    @property
    def updates_per_sec(self) -> float:
        """Updates per simulated second."""
        return len(self.updates) / self.seconds


def simulate(
    policy: base.Aggregation,
    durations: Callable[[int, int], float],
    num_updates: int,
    total_num_replicas: int,
) -> Simulation:
    """Runs a policy event by event. Each replica starts as soon as the policy allows it; no computation is cancelled.

    If not all waiting replicas may start, the one whose last start is longest ago starts first.

    A late replica may miss the next update, too. Drawing new durations for every step would not show this effect. Only
    gradients take time; updates and communication take none.

        random_durations = random.Random(0)
        simulation = simulate(
            BackupWorkers(spares=2), lambda replica, attempt: random_durations.expovariate(5.0), 1000, 8)
        simulation.updates_per_sec

    Args:
      policy: a policy that belongs to no strategy yet.
      durations: returns the seconds that replica `replica` needs for its gradient number `attempt`, counted from 0 for
        each replica. Called once for each gradient, in the order of their starts.
      num_updates: number of updates to make.
      total_num_replicas: number of replicas.

    Raises:
      RuntimeError: the policy lets no replica start, and no update is due.
    """
    policy.begin(total_num_replicas, "simulate")
    attempts = [0] * total_num_replicas
    accepted = [0] * total_num_replicas
    dropped = [0] * total_num_replicas
    # (time, replica, local step): of replicas that arrive at the same time, the lowest index is first.
    computing: list[tuple[float, int, int]] = []
    updates: list[base.Update] = []

    def start(time: float) -> None:
        for replica in policy.turns:
            if policy.may_start(replica):
                local_step = policy.started(replica, time)
                heapq.heappush(computing, (time + durations(replica, attempts[replica]), replica, local_step))
                attempts[replica] += 1

    time = 0.0
    policy.opened(time)
    start(time)
    while len(updates) < num_updates:
        if not computing:
            raise RuntimeError(f"{policy!r} lets no replica start in step {policy.step}, and no update is due")
        time, replica, local_step = heapq.heappop(computing)
        arrival = policy.arrived(replica, local_step, time)
        (accepted if arrival.accepted else dropped)[replica] += 1
        if not policy.update_due:
            start(time)
        while policy.update_due:
            updates.append(policy.updated(time))
            policy.opened(time)
            start(time)
    return Simulation(time, tuple(accepted), tuple(dropped), tuple(updates))
