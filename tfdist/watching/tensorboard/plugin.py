# SPDX-License-Identifier: Apache-2.0
"""TensorBoard plugin: the jobs below the log directory, the routes, and the answer of each route."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import werkzeug
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tfdist.planning import replay
from tfdist.policies.records import Outcome
from tfdist.telemetry import report
from tfdist.telemetry.update_log import LogReader, Skipped, Timeline, run_directory
from tfdist.telemetry.update_log.reader import find_logs
from tfdist.watching.tensorboard import level_of_detail

_POINTS = 1000
_MAX_SERIES = 500


def series_of(timeline: Timeline) -> dict[str, Any]:
    """Returns the loss, and bytes per second of each task: points of time after the job's origin, step and value."""
    series, losses, found = [], [], timeline.scalars
    for name in np.unique(found.scalar_name).tolist():
        rows = found[found.scalar_name == name]
        rows = rows[:: -(-len(rows) // _POINTS)]
        points = np.stack([rows.scalar_time, rows.scalar_step, rows.scalar_value], axis=1).tolist()
        kind, _, of = name.partition("/")
        if kind == "loss":
            losses.append({"name": of, "points": points})
        else:
            series.append({"direction": kind, "name": of, "points": points})
    return {"series": series[:_MAX_SERIES], "losses": losses}


# The disk is looked at again after so many seconds, and after ten times as long as the last look took.
_REREAD_SECS = 5.0
_LOOK_SECS = 10.0
# Times are those of so many gradients at most, the newest.
_NEWEST = 1_000_000
# More lanes than these don't fit a glance: then the costliest are first, else they are in the order of names.
_MOST_BY_NAME = 12


class RecordedJob:
    """One training: a timeline, and what is computed from it when the page first asks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        header = timeline.header
        self.id = hashlib.sha256(f"{timeline.job}\0{header.writer}\0{timeline.origin_secs!r}".encode()).hexdigest()[:16]
        self.run = run_directory(timeline)
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
        """Report of the newest updates."""
        newest = report.newest(self.timeline.updates, self.timeline.contributions, _NEWEST)
        return report.of_log(*newest, self.timeline.workers)

    @property
    def lanes(self) -> list[int]:
        """Workers in the order of their lanes: the slow ones first."""
        workers, slow = self.timeline.workers, self.report.slow.names if self.report.slow else ()
        names = self.report.order if len(workers) > _MOST_BY_NAME else workers
        index = {name: worker for worker, name in enumerate(workers)}
        return [index[name] for name in sorted(names, key=lambda name: name not in slow)]

    @functools.cached_property
    def table(self) -> list[dict[str, Any]]:
        """Table with a row for each worker, in the order of `Report.order`."""
        found = self.report
        if not found.updates:
            return []
        index = {name: worker for worker, name in enumerate(self.timeline.workers)}
        last, slow = _last(self.timeline), found.slow
        total, held = self.timeline.total(), self.levels.sums[level_of_detail.CHANNELS.index("held_secs")]
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
                    "held_secs": float(held[worker]),
                    "staleness_mean": float(total.staleness_sum[0, worker]) / max(1, total.accepted[0, worker]),
                    "staleness_max": int(total.staleness_max[0, worker]),
                }
            )
        return rows

    @functools.cached_property
    def advice(self) -> dict[str, Any]:
        """Result of a replay, which takes up to some seconds."""
        try:
            found = replay.advise(self.timeline)
        except replay.ReplayError as error:
            return {"state": "none", "reason": str(error)}
        cases = [
            {
                "workers": len(case.workers),
                "spares": case.spares,
                "updates": case.updates_per_sec,
                "gradients": case.gradients_per_sec,
                "now": not index,
                "chosen": case is found.chosen,
            }
            for index, case in enumerate(found.cases)
        ]
        facts = {"text": found.text, "measured": found.measured, "updates": found.updates}
        return {"state": "ready", "cases": cases, **facts}

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
            "left_out": timeline.left_out,
            "gradients": len(timeline.contributions),
            "origin_secs": timeline.origin_secs,
            "begin": begin,
            "end": end,
            "ended": timeline.ended,
        }


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


class Jobs:
    """All jobs below a log directory. Any thread may call it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._reader = LogReader(directory)
        self._lock = threading.Lock()
        self._next_read = -1e9
        self._jobs: dict[str, RecordedJob] = {}
        self._skipped: tuple[Skipped, ...] = ()
        self._next_look = -1e9
        self.has_logs = False

    def look(self) -> bool:
        """Returns True if there is a log, as far as is known; looks for one in the background, now and then."""
        if not self.has_logs and time.monotonic() >= self._next_look:
            self._next_look = math.inf
            looking = threading.Thread(target=self._look, name="tfdist plugin", daemon=True)
            looking.start()
            # Enough for a local directory, so that the tab is there at once.
            looking.join(0.2)
        return self.has_logs

    def all(self) -> tuple[list[RecordedJob], tuple[Skipped, ...]]:
        """Returns the jobs, the newest first, and the files that were skipped."""
        with self._lock:
            if time.monotonic() >= self._next_read:
                began = time.monotonic()
                reading = self._reader.read()
                self._skipped = reading.skipped
                if reading.is_new:
                    self._jobs = {job.id: job for job in map(RecordedJob, reversed(reading.timelines))}
                self.has_logs = bool(self._jobs or self._skipped)
                ended = time.monotonic()
                self._next_read = ended + max(_REREAD_SECS, 10 * (ended - began))
            return list(self._jobs.values()), self._skipped

    def get(self, job_id: str) -> RecordedJob | None:
        """Returns one of the known jobs."""
        if not self._jobs:
            self.all()
        return self._jobs.get(job_id)

    def _look(self) -> None:
        try:
            self.has_logs = next(find_logs(self._directory), None) is not None
            if self.has_logs:
                # The page asks for this first.
                for job in self.all()[0][:1]:
                    _ = job.levels
        except OSError:
            # The directory may come later.
            pass
        finally:
            self._next_look = time.monotonic() + _LOOK_SECS


# Answers of the data routes, as JSON values or as one binary block of arrays with a JSON header.


# A window with fewer gradients is sent gradient by gradient.
MAX_DETAIL = 5_000
_MAX_BUCKETS = 2_000
_MAX_CELLS = 600_000
_MAX_SHOWN = 200
_MAX_EVENTS = 1_000


class BadRequestError(ValueError):
    """A parameter that is missing or makes no sense; the message is sent to the page."""


def jobs(all_jobs: Sequence[RecordedJob], skipped: Sequence[Skipped], logdir: str) -> dict[str, Any]:
    """Returns all jobs, the newest first, and the files that were skipped."""
    return {
        "logdir": logdir,
        "jobs": [job.summary() for job in all_jobs],
        "skipped": [{"path": each.path, "reason": each.reason} for each in skipped[:_MAX_SHOWN]],
        "num_skipped": len(skipped),
    }


def workers(job: RecordedJob) -> dict[str, Any]:
    """Returns the table of workers, their lanes, the newest events, and how often each staleness was seen."""
    events = job.timeline.events[-_MAX_EVENTS:]
    rows = job.timeline.contributions
    staleness = np.bincount(rows.staleness[rows.outcome == 0])
    return {
        "rows": job.table,
        "lanes": job.lanes,
        "in_words": job.report.in_words,
        # Sums of each channel over the whole training: what is zero needs no legend.
        "sums": dict(zip(level_of_detail.CHANNELS, job.levels.sums.sum(axis=1).tolist(), strict=True)),
        "detail_updates": job.report.updates,
        "events": [
            {"time": float(moment), "worker": int(worker), "kind": int(kind), "text": str(text), "secs": float(secs)}
            for moment, worker, kind, text, secs in zip(*events.arrays().values(), strict=True)
        ],
        "num_events": len(job.timeline.events),
        "staleness": {str(value): int(staleness[value]) for value in np.flatnonzero(staleness)[:_MAX_SHOWN]},
    }


def window(job: RecordedJob, begin: float, end: float, buckets: int) -> bytes:
    """Returns a window: single gradients if they are few, else sums of buckets.

    Raises:
      BadRequestError: the window is empty.
    """
    if not (np.isfinite(begin) and np.isfinite(end) and end > begin):
        raise BadRequestError(f"begin must be before end. Received: begin={begin}, end={end}")
    buckets = max(1, min(buckets, _MAX_BUCKETS, _MAX_CELLS // len(job.timeline.workers)))
    found = job.levels.window(begin, end, buckets)
    header = {
        "begin": begin,
        "secs": (end - begin) / buckets,
        "buckets": buckets,
        "workers": len(job.timeline.workers),
        "exact": found.is_exact,
        "channels": list(level_of_detail.CHANNELS),
        "update_channels": list(level_of_detail.UPDATE_CHANNELS),
        "detail": job.levels.is_detailed(begin, end, MAX_DETAIL),
    }
    arrays = {"cells": found.cells, "totals": found.totals}
    if header["detail"]:
        arrays |= _gradients(job, begin, end)
    return packed(header, arrays)


def _gradients(job: RecordedJob, begin: float, end: float) -> dict[str, np.ndarray]:
    """Returns the single gradients of a window, with times in seconds after its begin."""
    first, last = job.levels.rows(begin, end)
    updates, offsets = job.timeline.updates[first:last], job.timeline.updates.offsets
    rows = job.timeline.contributions[offsets[first] : offsets[last]]
    made = np.repeat(updates.time - begin, updates.count)
    # By their start: the page takes the gradients of a worker to follow each other.
    order = np.argsort(made + rows.start, kind="stable")
    rows, made, step = rows[order], made[order], np.repeat(updates.step, updates.count)[order]
    return {
        "worker": rows.worker.astype(np.int32),
        "start": (made + rows.start).astype(np.float32),
        "arrival": (made + rows.arrival).astype(np.float32),
        "update": made.astype(np.float32),
        "step": step.astype(np.int32),
        "outcome": rows.outcome.astype(np.int32),
        "staleness": rows.staleness.astype(np.int32),
        "held": rows.held,
        "input": rows.input,
        "reduce": np.repeat(updates.reduce, updates.count)[order],
        "weight": rows.weight,
        "update_time": (updates.time - begin).astype(np.float32),
        "update_step": updates.step.astype(np.int32),
    }


def packed(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Packs arrays of four-byte numbers behind a JSON header.

    The block is: length of the header (uint32, little endian), the header, spaces up to a multiple of four, then the
    arrays one after the other. The header's "arrays" lists name, "f" or "i", and shape of each.
    """
    layout = [{"name": name, "kind": array.dtype.kind, "shape": array.shape} for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": layout}, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    parts = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<I", len(text)), text, *parts])


_STATIC = pathlib.Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_LOGGER = logging.getLogger("tfdist")
_NO_LOGDIR = "the tfdist page reads update logs below a directory; start TensorBoard with --logdir of a file system"


class TfdistPlugin(base_plugin.TBPlugin):
    """Serves the page and its data, and nothing else: a job is named by an identifier, never by a path."""

    plugin_name = "tfdist"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdir = context.logdir or ""
        self._jobs = Jobs(self._logdir) if self._logdir and "://" not in self._logdir else None

    def is_active(self) -> bool:
        """Returns True once a log was seen. Looking for logs is done in the background."""
        return self._jobs is not None and self._jobs.look()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Returns the page's entry."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="tfdist")

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Returns the routes: one for each file of the page, and those of the data."""
        files = {f"/{path.name}": _file(path) for path in sorted(_STATIC.iterdir()) if path.suffix in _TYPES}
        return {
            **files,
            "/jobs": self._route(lambda request: jobs(*self._known().all(), self._logdir)),
            "/workers": self._route(lambda request: workers(self._job(request))),
            "/window": self._route(self._window),
            "/scalars": self._route(lambda request: series_of(self._job(request).timeline)),
            "/advice": self._route(lambda request: self._job(request).advice),
        }

    def _route(self, answer: Callable[[wrappers.Request], Any]) -> Callable[..., Any]:
        """Wraps an answer, so that any error is one line on the page and TensorBoard continues."""

        @wrappers.Request.application
        def respond(request: wrappers.Request) -> werkzeug.Response:
            try:
                content = answer(request)
            except BadRequestError as error:
                return http_util.Respond(request, {"error": str(error)}, "application/json", 400)
            except OSError as error:
                return http_util.Respond(request, {"error": f"can't read the logs: {error}"}, "application/json", 503)
            except Exception as error:
                _LOGGER.exception("the tfdist plugin failed at %s", request.path)
                return http_util.Respond(request, {"error": repr(error)}, "application/json", 500)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            return http_util.Respond(request, content, kind)

        return respond

    def _known(self) -> Jobs:
        if self._jobs is None:
            raise BadRequestError(_NO_LOGDIR)
        return self._jobs

    def _job(self, request: wrappers.Request) -> RecordedJob:
        job = self._known().get(request.args.get("job", ""))
        if job is None:
            raise BadRequestError("there is no such job; the log directory may have changed: reload the page")
        return job

    def _window(self, request: wrappers.Request) -> bytes:
        job = self._job(request)
        begin, end = (_number(request, name, float) for name in ("begin", "end"))
        return window(job, begin, end, _number(request, "buckets", int))


def _number(request: wrappers.Request, name: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(request.args[name])
    except (KeyError, ValueError, OverflowError):
        raise BadRequestError(f"{name} must be a number. Received: {name}={request.args.get(name)!r}") from None


def _file(path: pathlib.Path) -> Callable[..., Any]:
    @wrappers.Request.application
    def respond(request: wrappers.Request) -> werkzeug.Response:
        return http_util.Respond(request, path.read_bytes(), _TYPES[path.suffix])

    return respond
