# SPDX-License-Identifier: Apache-2.0
"""What a policy reaches event by event, without any overhead: the limit for the engines, and in no time."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable

from tfdist.policies import base


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` saw.

    Attributes:
      seconds: simulated time until the last update.
      accepted: gradients accepted, per replica.
      dropped: gradients that arrived and were dropped, per replica.
      updates: one for each update, in order.
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
    """Runs a policy event by event: each replica starts as soon as it may, and nobody is cancelled.

    Where not all that wait may start, the one does whose last start is the longest ago.

    So a late replica may miss the next update too, which drawing new durations for every step would not show. An update
    takes no time, nor does anything but computing.

        law = random.Random(0)
        simulation = simulate(BackupWorkers(spares=2), lambda replica, attempt: law.expovariate(5.0), 1000, 8)
        simulation.updates_per_sec

    Args:
      policy: one that belongs to no strategy yet.
      durations: the seconds that replica `replica` needs for its gradient number `attempt`, counted from 0 for each
        replica; asked once for each, in the order in which they start.
      num_updates: how many updates to make.
      total_num_replicas: how many replicas there are.

    Raises:
      RuntimeError: the policy lets nobody start, and no update is due.
    """
    policy.begin(total_num_replicas, "simulate")
    attempts = [0] * total_num_replicas
    accepted = [0] * total_num_replicas
    dropped = [0] * total_num_replicas
    # (time, replica, local step): of those that arrive at the same time, the lowest number is first.
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
            raise RuntimeError(f"{policy!r} lets nobody start in step {policy.step}, and no update is due")
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
