# SPDX-License-Identifier: Apache-2.0
"""Table of workers: how much each one computes, how often it is late, and what it costs the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry import report
from tfdist.telemetry.report import Report
from tfdist.telemetry.update_log import Timeline
from tfdist.watching.tensorboard import level_of_detail

# Times are those of so many gradients at most, the newest.
_NEWEST = 1_000_000
# More lanes than these don't fit a glance: then the costliest are first, else they are in the order of names.
_MOST_BY_NAME = 12


def report_of(timeline: Timeline) -> Report:
    """Returns the report of a timeline's newest updates."""
    return report.of_log(*report.newest(timeline.updates, timeline.contributions, _NEWEST), timeline.workers)


def lanes(timeline: Timeline, found: Report) -> list[int]:
    """Returns the workers in the order of their lanes: the slow ones first."""
    slow = found.slow.names if found.slow else ()
    names = found.order if len(timeline.workers) > _MOST_BY_NAME else timeline.workers
    index = {name: worker for worker, name in enumerate(timeline.workers)}
    return [index[name] for name in sorted(names, key=lambda name: name not in slow)]


def table(timeline: Timeline, levels: level_of_detail.Levels, found: Report) -> list[dict[str, Any]]:
    """Returns a row for each worker, in the order of `Report.order`.

    Args:
      timeline: the timeline.
      levels: its sums.
      found: its report.
    """
    total = timeline.total()
    if not len(total):
        return []
    index = {name: worker for worker, name in enumerate(timeline.workers)}
    last, slow = _last(timeline), found.slow
    rows = []
    for name in found.order:
        worker = index[name]
        step = found.step_secs.get(name)
        parts = (each.get(name) for each in (found.input_secs, found.compute_secs, found.rest_secs))
        read, compute, rest = (each.p50 if each else 0.0 for each in parts)
        rows.append(
            {
                "worker": worker,
                "name": name,
                "is_slow": slow is not None and name in slow.names,
                "cost_secs": found.cost_secs[name],
                "last": int(last[worker]),
                "accepted": int(total.accepted[0, worker]),
                "dropped": int(total.dropped[0, worker]),
                "lost": int(total.lost[0, worker]),
                "compute_p50": step.p50 if step else 0.0,
                "compute_p95": step.p95 if step else 0.0,
                "input_p50": read,
                "computing_p50": compute,
                "rest_p50": rest,
                "wait_secs": float(total.wait_secs[0, worker]),
                "held_secs": float(levels.sums[level_of_detail.CHANNELS.index("held_secs"), worker]),
                "staleness_mean": float(total.staleness_sum[0, worker]) / max(1, total.accepted[0, worker]),
                "staleness_max": int(total.staleness_max[0, worker]),
            }
        )
    return rows


def _last(timeline: Timeline) -> np.ndarray:
    """Returns the number of updates in which each worker's gradient was the last one."""
    rows, counts = timeline.contributions, timeline.updates.count
    begins = timeline.updates.offsets[:-1][counts > 0]
    if not len(begins):
        return np.zeros(len(timeline.workers), np.int64)
    arrival = np.where(rows.outcome == Outcome.ACCEPTED, rows.arrival, -np.inf)
    latest = np.maximum.reduceat(arrival, begins)
    update = np.repeat(np.arange(len(begins)), counts[counts > 0])
    candidates = np.flatnonzero((arrival == latest[update]) & np.isfinite(arrival))
    # Of gradients that arrived at the same time one is the last.
    position = candidates[np.append(np.diff(update[candidates]) > 0, [True] * min(1, len(candidates)))]
    return np.bincount(rows.worker[position], minlength=len(timeline.workers))
