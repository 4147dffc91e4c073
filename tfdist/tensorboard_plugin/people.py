# SPDX-License-Identifier: Apache-2.0
"""Table of workers: how much each one computes, how often it is late, and by how much it delays the updates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tfdist.update_log import Groups, Timeline
from tfdist.update_log.records import Outcome

# Percentiles come from so many gradients at most, spread evenly over the timeline.
_SAMPLE = 500_000


def table(timeline: Timeline, total: Groups) -> list[dict[str, Any]]:
    """Returns a row for each worker, the one that delays the updates most first; `total` adds up the timeline.

    `delay_secs` adds up, over the updates in which the worker's gradient was the last one that entered, the time since
    the last but one: by so much the updates would have been earlier without this worker's gradient.
    """
    if not len(total):
        return []
    delay, last = _delays(timeline)
    percentiles = _percentiles(timeline)
    rows = []
    for worker, name in enumerate(timeline.workers):
        accepted, dropped, lost = (int(getattr(total, n)[0, worker]) for n in ("accepted", "dropped", "lost"))
        rows.append(
            {
                "worker": worker,
                "name": name,
                "delay_secs": float(delay[worker]),
                "last": int(last[worker]),
                "accepted": accepted,
                "dropped": dropped,
                "lost": lost,
                "compute_mean": float(total.compute_secs[0, worker]) / max(1, accepted + dropped + lost),
                "compute_p50": percentiles[worker][0],
                "compute_p95": percentiles[worker][1],
                "compute_max": float(total.compute_max[0, worker]),
                "wait_secs": float(total.wait_secs[0, worker]),
                "held_secs": float(total.held_secs[0, worker]),
                "staleness_mean": float(total.staleness_sum[0, worker]) / max(1, accepted),
                "staleness_max": int(total.staleness_max[0, worker]),
            }
        )
    return sorted(rows, key=lambda row: (-row["delay_secs"], -row["dropped"], row["worker"]))


def _delays(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds by which each worker delayed updates, and the number of those updates."""
    workers = len(timeline.workers)
    rows, counts = timeline.contributions, timeline.updates.count
    begins = timeline.updates.offsets[:-1][counts > 0]
    if not len(begins):
        return np.zeros(workers), np.zeros(workers, np.int64)
    arrival = np.where(rows.outcome == Outcome.ACCEPTED, rows.arrival, -np.inf)
    latest = np.maximum.reduceat(arrival, begins)
    update = np.repeat(np.arange(len(begins)), counts[counts > 0])
    candidates = np.flatnonzero((arrival == latest[update]) & np.isfinite(arrival))
    # Of gradients that arrived at the same time one is the last.
    position = candidates[np.append(np.diff(update[candidates]) > 0, [True] * min(1, len(candidates)))]
    arrival[position] = -np.inf
    second = np.maximum.reduceat(arrival, begins)[update[position]]
    late = np.where(np.isfinite(second), latest[update[position]] - second, 0)
    worker = rows.worker[position]
    return np.bincount(worker, late, workers), np.bincount(worker, minlength=workers)


def _percentiles(timeline: Timeline) -> list[tuple[float, float]]:
    rows = timeline.contributions
    stride = -(-len(rows) // _SAMPLE) or 1
    # An odd stride that shares no factor with the number of workers takes all of them.
    while stride > 1 and np.gcd(stride, len(timeline.workers)) > 1:
        stride += 1
    rows = rows[::stride]
    secs = rows.arrival - rows.start
    order = np.argsort(rows.worker, kind="stable")
    limits = np.searchsorted(rows.worker[order], np.arange(len(timeline.workers) + 1))
    found = []
    for begin, end in itertools.pairwise(limits):
        values = secs[order[begin:end]]
        found.append(tuple(map(float, np.percentile(values, (50, 95)))) if len(values) else (0.0, 0.0))
    return found
