# SPDX-License-Identifier: Apache-2.0
"""Jobs below TensorBoard's log directory: reads their logs, and keeps what the page has asked of each."""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.telemetry import report, scalar_files
from tfdist.telemetry.scalar_files import Point, ScalarFiles, Scalars
from tfdist.telemetry.update_log import Files, LocalFiles, LogReader, Skipped, Timeline, run_directory
from tfdist.telemetry.update_log.reader import find_logs
from tfdist.watching.tensorboard import advice, level_of_detail, worker_table

# Loss, and bytes per second of each task, from the files of `tfdist.callbacks.Telemetry`.


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


# The disk is looked at again after so many seconds, and after ten times as long as the last look took.
_REREAD_SECS = 5.0
_LOOK_SECS = 10.0


class RecordedJob:
    """One training: a timeline, and what is computed from it when the page first asks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        header = timeline.header
        self.id = hashlib.sha256(f"{timeline.job}\0{header.writer}\0{timeline.origin_secs!r}".encode()).hexdigest()[:16]
        self.run = run_directory(timeline)
        self.advisor = advice.Advisor(timeline)
        self._lock = threading.Lock()
        self._levels: level_of_detail.Levels | None = None

    @property
    def levels(self) -> level_of_detail.Levels:
        """Sums over any window. The page asks for them in several requests at once; they are computed once."""
        with self._lock:
            if self._levels is None:
                self._levels = level_of_detail.Levels(self.timeline)
            return self._levels

    @functools.cached_property
    def report(self) -> report.Report:
        """Returns what `Report` says of the newest updates."""
        return worker_table.report_of(self.timeline)

    @functools.cached_property
    def table(self) -> list[dict[str, Any]]:
        """Rows of the table of workers."""
        return worker_table.table(self.timeline, self.levels, self.report)

    def summary(self) -> dict[str, Any]:
        """Returns the fields of a job in the list of jobs."""
        timeline, header = self.timeline, self.timeline.header
        begin, end = timeline.span
        return {
            "id": self.id,
            "run": self.run,
            "job": timeline.job,
            "writers": sorted({each.writer for each in timeline.headers.values()})[:100],
            "strategy": header.strategy,
            "policies": list(header.policies),
            "simulated": header.simulated,
            "workers": list(timeline.workers),
            "updates": timeline.num_updates,
            "aggregated_updates": int(timeline.groups.updates.sum()),
            "gradients": len(timeline.contributions),
            "origin_secs": timeline.origin_secs,
            "begin": begin,
            "end": end,
            "ended": timeline.ended,
        }


class Jobs:
    """All jobs below a directory. Any thread may call it.

    Args:
      directory: the log directory.
      files: its file system.
      clock: seconds, for the intervals between two readings.
    """

    def __init__(self, directory: str, files: Files | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._files = files or LocalFiles()
        self._reader = LogReader(directory, self._files)
        self._clock = clock
        self._lock = threading.Lock()
        self._next_read = -1e9
        self._jobs: dict[str, RecordedJob] = {}
        self._skipped: tuple[Skipped, ...] = ()
        self._scalars: dict[str, ScalarFiles] = {}
        self._looking: threading.Thread | None = None
        self._next_look = -1e9
        self.has_logs = False

    def look(self) -> bool:
        """Returns True if there is a log, as far as is known; looks for one in the background, now and then."""
        if not self.has_logs and self._clock() >= self._next_look and not (self._looking and self._looking.is_alive()):
            self._next_look = self._clock() + _LOOK_SECS
            self._looking = threading.Thread(target=self._look, name="tfdist plugin", daemon=True)
            self._looking.start()
            # Enough for a local directory, so that the tab is there at once.
            self._looking.join(0.2)
        return self.has_logs

    def all(self) -> tuple[list[RecordedJob], tuple[Skipped, ...]]:
        """Returns the jobs, the newest first, and the files that were skipped."""
        with self._lock:
            if self._clock() >= self._next_read:
                began = self._clock()
                self._read()
                ended = self._clock()
                self._next_read = ended + max(_REREAD_SECS, 10 * (ended - began))
            return list(self._jobs.values()), self._skipped

    def get(self, job_id: str) -> RecordedJob | None:
        """Returns one of the known jobs."""
        if not self._jobs:
            self.all()
        return self._jobs.get(job_id)

    def scalars(self, job: RecordedJob) -> dict[str, Any]:
        """Returns the loss, and the bytes of the tasks, of a job."""
        path = "/".join(filter(None, (self._directory.rstrip("/"), job.run)))
        with self._lock:
            found = self._scalars.setdefault(job.run, ScalarFiles(path, self._files)).read()
            return of_job(found, job.timeline)

    def _read(self) -> None:
        reading = self._reader.read()
        self._skipped = reading.skipped
        if reading.is_new:
            kept = {id(job.timeline): job for job in self._jobs.values()}
            jobs = [kept.get(id(timeline)) or RecordedJob(timeline) for timeline in reversed(reading.timelines)]
            self._jobs = {job.id: job for job in jobs}
        self.has_logs = bool(self._jobs or self._skipped)

    def _look(self) -> None:
        try:
            self.has_logs = bool(list(itertools.islice(find_logs(self._directory, self._files), 1)))
            if self.has_logs:
                # The page asks for this first.
                for job in self.all()[0][:1]:
                    _ = job.levels
        except OSError:
            # The directory may come later.
            pass
