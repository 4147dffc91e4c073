# SPDX-License-Identifier: Apache-2.0
"""Runs below a log directory: which jobs belong to a run, and which run a command shows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdist.update_log import Timeline, run_directory


def name_of(timeline: Timeline, directory: str) -> str:
    """Returns the name of a job's run: the directory of its logs below `directory`, without that of the writer."""
    path = run_directory(timeline)
    return path or os.path.basename(os.path.abspath(directory)) or directory  # noqa: PTH100, PTH119 - a name


def started(timeline: Timeline) -> float:
    """Returns the Unix time of a job's beginning."""
    return timeline.origin_secs + timeline.span[0]


def chosen(timelines: Sequence[Timeline], directory: str, run: str | None) -> list[Timeline]:
    """Returns the jobs of one run, by their beginning: of the run that began last, if `run` is None.

    A run has several jobs if several trainings, or several parts of a resumed one, wrote to its directory. `run` may
    also be the identifier of a job.
    """
    ordered = sorted(timelines, key=started)
    if run is None:
        run = name_of(ordered[-1], directory) if ordered else ""
    return [each for each in ordered if run in (name_of(each, directory), each.job)]
