# SPDX-License-Identifier: Apache-2.0
"""Aggregates consecutive updates into groups: for old segments of a log, and for levels of detail on a screen.

`summarize` takes single updates, `regroup` takes groups. Both give the same numbers, up to the rounding of float32:
`regroup(summarize(..., small), large) == summarize(..., large)`.
"""

from __future__ import annotations

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log.columns import Contributions, Groups, Updates

GROUP_STEPS = 64
COARSE_GROUP_STEPS = 4096
_MAXIMA = ("compute_max", "staleness_max")


def buckets(first_step: np.ndarray, steps: int) -> np.ndarray:
    """Returns the index at which each group begins, if a group has the updates of equal (step - 1) // steps.

    Groups of all workers' logs then have the same limits. Where a job goes back to an earlier step, a group begins.
    """
    if not len(first_step):
        return np.zeros(0, np.int64)
    bucket = (first_step - 1) // steps
    begins = (bucket[1:] != bucket[:-1]) | (first_step[1:] < first_step[:-1])
    return np.flatnonzero(np.concatenate([[True], begins]))


def summarize(updates: Updates, contributions: Contributions, starts: np.ndarray, workers: int) -> Groups:
    """Adds up updates.

    Args:
      updates: n updates.
      contributions: their contributions, in the order of the updates.
      starts: index of the first update of each group, increasing, from 0.
      workers: number of workers.
    """
    if not len(starts):
        return Groups.empty(workers)
    ends = np.append(starts[1:], len(updates))
    first, last = starts, ends - 1
    opening = updates.time - updates.opened
    return Groups.of(
        first_step=updates.step[first],
        last_step=updates.step[last],
        begin=opening[first],
        end=updates.time[last],
        updates=ends - starts,
        examples=_sums(updates.examples, starts, np.int64),
        wait=_sums(updates.wait, starts, np.float64),
        reduce_secs=_sums(updates.reduce, starts, np.float64),
        phase=updates.phase[last],
        **_cells(updates, contributions, starts, workers),
    )


def regroup(groups: Groups, starts: np.ndarray) -> Groups:
    """Adds up groups: `starts` has the index of the first of the given groups of each new one, from 0."""
    if not len(starts):
        return groups[:0]
    last = np.append(starts[1:], len(groups)) - 1
    cells = {name: _reduced(name, getattr(groups, name), starts) for name in Groups.CELLS}
    return Groups.of(
        first_step=groups.first_step[starts],
        last_step=groups.last_step[last],
        begin=groups.begin[starts],
        end=groups.end[last],
        updates=_sums(groups.updates, starts, np.int64),
        examples=_sums(groups.examples, starts, np.int64),
        wait=_sums(groups.wait, starts, np.float64),
        reduce_secs=_sums(groups.reduce_secs, starts, np.float64),
        phase=groups.phase[last],
        **cells,
    )


def _cells(updates: Updates, contributions: Contributions, starts: np.ndarray, workers: int) -> dict[str, np.ndarray]:
    """Returns the columns of shape [g, w]."""
    shape = len(starts), workers
    ends = np.append(starts[1:], len(updates))
    offsets = updates.offsets
    per_group = offsets[ends] - offsets[starts]
    cell = np.repeat(np.arange(len(starts), dtype=np.int64) * workers, per_group) + contributions.worker
    secs = contributions.arrival - contributions.start
    is_accepted = contributions.outcome == Outcome.ACCEPTED
    accepted = cell[is_accepted]
    waits = -contributions.arrival - np.repeat(updates.reduce, updates.count)
    staleness = contributions.staleness[is_accepted]
    size = shape[0] * shape[1]

    def total(cells: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(cells, weights, size).reshape(shape)

    def largest(cells: np.ndarray, values: np.ndarray) -> np.ndarray:
        result = np.zeros(size, values.dtype)
        np.maximum.at(result, cells, values)
        return result.reshape(shape)

    return {
        "accepted": total(accepted),
        "dropped": total(cell[contributions.outcome == Outcome.DROPPED]),
        "lost": total(cell[contributions.outcome == Outcome.LOST]),
        "compute_secs": total(cell, secs),
        "compute_max": largest(cell, secs),
        "wait_secs": total(accepted, waits[is_accepted]),
        "held_secs": total(cell, contributions.held),
        "input_secs": total(cell, contributions.input),
        "staleness_sum": total(accepted, staleness),
        "staleness_max": largest(accepted, staleness),
    }


def _sums(values: np.ndarray, starts: np.ndarray, dtype: type) -> np.ndarray:
    return np.add.reduceat(values, starts, dtype=dtype)


def _reduced(name: str, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    if name in _MAXIMA:
        return np.maximum.reduceat(values, starts, axis=0)
    return np.add.reduceat(values, starts, axis=0, dtype=np.float64)
