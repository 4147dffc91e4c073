# SPDX-License-Identifier: Apache-2.0
"""Bytes that tasks have sent and received, from the scalars that `tfdist.callbacks.Telemetry` has written."""

from __future__ import annotations

import re
from typing import Any

from tensorboard.data import provider

from tfdist.tensorboard_plugin.jobs import Job

_TAG = re.compile(r"tfdist/bytes_(sent|received)/(.{1,200})", re.DOTALL)
_POINTS = 1000
_MAX_SERIES = 500


def sent(data_provider: Any, context: Any, experiment: str, job: Job) -> dict[str, Any]:
    """Returns the series of the runs below the job's run: points of time after the job's origin, step and value."""
    if data_provider is None:
        return {"series": []}
    listed = data_provider.list_scalars(context, experiment_id=experiment, plugin_name="scalars")
    runs = [run for run in listed if not job.run or run == job.run or run.startswith(f"{job.run}/")]
    tags = sorted({tag for run in runs for tag in listed[run] if _TAG.fullmatch(tag)})[:_MAX_SERIES]
    if not tags:
        return {"series": []}
    chosen = provider.RunTagFilter(runs=runs, tags=tags)
    found = data_provider.read_scalars(
        context, experiment_id=experiment, plugin_name="scalars", downsample=_POINTS, run_tag_filter=chosen
    )
    series = []
    for run in sorted(found):
        for tag in sorted(found[run]):
            _, direction, name = tag.split("/", 2)
            points = [
                [datum.wall_time - job.timeline.origin_secs, datum.step, float(datum.value)]
                for datum in found[run][tag]
            ]
            series.append({"run": run, "direction": direction.removeprefix("bytes_"), "name": name, "points": points})
    return {"series": series}
