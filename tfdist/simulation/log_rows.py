# SPDX-License-Identifier: Apache-2.0
"""Rows of an update log (docs/update_log.md) from a simulation, so that viewers show simulated and real runs alike."""

from __future__ import annotations

import bisect
from typing import Any

from tfdist.simulation import gradient_records
from tfdist.simulation.result import Simulation

_OUTCOMES = {gradient_records.ACCEPTED: 0, gradient_records.DROPPED: 1, gradient_records.LOST: 2}


def update_rows(simulation: Simulation, examples_per_gradient: int = 0) -> list[tuple[Any, ...]]:
    """Returns a tuple for each update, with the fields of `tfdist.update_log.UpdateRecord` in their order.

    Gradients that were dropped or lost are in the next update. Those in flight at the end are left out.
    """
    contributions: list[list[tuple[Any, ...]]] = [[] for _ in simulation.updates]
    records, updates, times = simulation.gradients, simulation.updates, simulation.times
    weights = [dict(zip(update.staleness, update.weights, strict=True)) for update in updates]
    idle_since: dict[int, float] = {}
    for replica, started, arrived, outcome, staleness, update in zip(
        records.replica,
        records.started,
        records.arrived,
        records.outcome,
        records.staleness,
        records.update,
        strict=True,
    ):
        held = started - idle_since.get(replica, started)
        idle_since[replica] = arrived
        if outcome == gradient_records.IN_FLIGHT:
            continue
        index = update - 1 if update > 0 else bisect.bisect_left(times, arrived)
        if index < len(updates):
            weight = weights[index][staleness] if update > 0 else 0.0
            row = (replica, started, arrived, _OUTCOMES[outcome], max(0, staleness), weight, max(0.0, held))
            contributions[index].append(row)
    return [
        (
            update.step,
            times[index],
            times[index] - simulation.opened[index],
            update.wait_secs,
            len(update.contributors) * examples_per_gradient,
            int(simulation.taking_part[index] < simulation.replicas),
            contributions[index],
        )
        for index, update in enumerate(updates)
    ]
