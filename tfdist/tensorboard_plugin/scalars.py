# SPDX-License-Identifier: Apache-2.0
"""Bytes per second that tasks have sent and received, from the scalars of `tfdist.callbacks.Telemetry`."""

from __future__ import annotations

import re
from typing import Any

from tensorboard.data import provider

from tfdist.tensorboard_plugin.jobs import Job

# Scalars of the process of a task; docs/telemetry.md has the list of tags.
TAGS = {"tfdist/network/sent_bytes_per_sec": "sent", "tfdist/network/received_bytes_per_sec": "received"}
_TASK_RUN = re.compile(r"workers/worker_(\d+)|ps/ps_(\d+)|policy")
_POINTS = 1000
_MAX_SERIES = 500
# Telemetry writes a point every 5 s: the last one of a training may be later than its last update.
_LATE_SECS = 10.0


def sent(data_provider: Any, context: Any, experiment: str, job: Job) -> dict[str, Any]:
    """Returns the series of the tasks of a job: points of time after the job's origin, step and bytes per second."""
    if data_provider is None:
        return {"series": []}
    listed = data_provider.list_scalars(context, experiment_id=experiment, plugin_name="scalars")
    tasks = {run: task for run in listed if (task := _task(run, job)) and TAGS.keys() & listed[run].keys()}
    if not tasks:
        return {"series": []}
    chosen = provider.RunTagFilter(runs=list(tasks), tags=list(TAGS))
    found = data_provider.read_scalars(
        context, experiment_id=experiment, plugin_name="scalars", downsample=_POINTS, run_tag_filter=chosen
    )
    series = []
    for run in sorted(found):
        for tag in sorted(found[run], reverse=True):
            points = _points(found[run][tag], job)
            if points:
                series.append({"run": run, "direction": TAGS[tag], "name": tasks[run], "points": points})
    return {"series": series[:_MAX_SERIES]}


def _task(run: str, job: Job) -> str | None:
    """Returns the task whose process a run of TensorBoard is about; None if it is of no task of the job."""
    prefix = f"{job.run}/" if job.run else ""
    match = _TASK_RUN.fullmatch(run.removeprefix(prefix)) if run.startswith(prefix) else None
    if match is None:
        return None
    worker, server = match.groups()
    if worker is not None:
        return f"worker:{int(worker)}"
    return f"ps:{int(server)}" if server is not None else job.timeline.header.writer


def _points(data: Any, job: Job) -> list[list[float]]:
    begin, end = job.timeline.span
    origin = job.timeline.origin_secs
    rows = [[datum.wall_time - origin, datum.step, float(datum.value)] for datum in data]
    # Several trainings may have written to one directory.
    return [row for row in rows if begin <= row[0] <= end + _LATE_SECS]
