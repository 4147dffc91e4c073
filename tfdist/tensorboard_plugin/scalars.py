# SPDX-License-Identifier: Apache-2.0
"""Loss, and bytes per second of each task, from the files of `tfdist.callbacks.Telemetry`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.telemetry import scalar_files
from tfdist.telemetry.scalar_files import Point, Scalars
from tfdist.update_log import Timeline

DIRECTIONS = {scalar_files.SENT: "sent", scalar_files.RECEIVED: "received"}
_RUNS = {"train": "train", "tfdist_train": "train", "validation": "validation", "tfdist_validation": "validation"}
_POINTS = 1000
_MAX_SERIES = 500
# Telemetry writes a point every 5 s: the last one of a training may be later than its last update.
_LATE_SECS = 10.0


def of_job(found: Scalars, timeline: Timeline) -> dict[str, Any]:
    """Returns the series of a job: points of time after the job's origin, step and value.

    Args:
      found: the scalars in the job's run directory.
      timeline: the job.
    """
    series, losses = [], []
    for folder in sorted(found):
        for tag in sorted(found[folder], reverse=True):
            points = _points(found[folder][tag], timeline)
            if points and tag in DIRECTIONS:
                # The run itself has the process of the chief, or the only one.
                name = scalar_files.task_of(folder) or timeline.header.writer
                series.append({"run": folder, "direction": DIRECTIONS[tag], "name": name, "points": points})
            elif points and folder in _RUNS:
                losses.append({"name": _RUNS[folder], "points": points})
    return {"series": series[:_MAX_SERIES], "losses": losses}


def _points(points: Sequence[Point], timeline: Timeline) -> list[list[float]]:
    begin, end = timeline.span
    events = timeline.events
    end = max([end, *(events.event_time + events.event_secs).tolist()]) + _LATE_SECS
    rows = [[each.wall_time - timeline.origin_secs, each.step, each.value] for each in points]
    # Several trainings may have written to one directory.
    rows = [row for row in rows if begin <= row[0] <= end]
    return rows[:: -(-len(rows) // _POINTS)] if rows else []
