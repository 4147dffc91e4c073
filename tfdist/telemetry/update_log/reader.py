# SPDX-License-Identifier: Apache-2.0
"""Reads all update logs below a directory, again and again: only what has changed is read from the disk.

The logs of one job follow each other in time. They make one `Timeline`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log.columns import (
    SUFFIX,
    Contributions,
    EventKind,
    Events,
    Groups,
    Header,
    Scalars,
    Segment,
    Updates,
)
from tfdist.telemetry.update_log.writer import HEADER

_DIRECTORY = re.compile(r"updates(_\d+)?")
_MAX_DEPTH = 6
_THREADS = 4
# Clocks of hosts differ: a training has not ended if it makes updates so long after its end.
_APART_SECS = 1.0
# A log below its run directory, as `Telemetry` writes it, or one of a program of the user's own.
_LOG = re.compile(r"(^|/)(policy/)?updates(_\d+)?$")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All logs of one job. Times are seconds after `origin_secs`.

    Attributes:
      job: identifier of the job.
      headers: header of each log, by its directory.
      workers: names of all workers; the columns have indices into it.
      origin_secs: Unix time of second 0.
      left_out: number of updates, the oldest, that the log doesn't keep any more.
      updates: all later ones, in order.
      contributions: their gradients, in the order of the updates.
      events: events, by time.
      scalars: measurements, by time.
    """

    job: str
    headers: dict[str, Header]
    workers: tuple[str, ...]
    origin_secs: float
    left_out: int
    updates: Updates
    contributions: Contributions
    events: Events
    scalars: Scalars

    @property
    def header(self) -> Header:
        """Header of the first log."""
        return next(iter(self.headers.values()))

    @property
    def num_updates(self) -> int:
        """Number of updates, with those that were left out."""
        return self.left_out + len(self.updates)

    @property
    def span(self) -> tuple[float, float]:
        """Time of the opening of the first update, and of the last update; (0, 0) without any."""
        times = self.updates.time
        return (float(times[0] - self.updates.opened[0]), float(times[-1])) if len(times) else (0.0, 0.0)

    @property
    def ended(self) -> str:
        """Text of the event that ended the training; "" while it runs, or where no log says so."""
        ends = np.flatnonzero(self.events.event_kind == EventKind.FINISHED)
        is_last = len(ends) and not (self.updates.time[-1:] > self.events.event_time[ends[-1]] + _APART_SECS).any()
        return str(self.events.event_text[ends[-1]]) if is_last else ""

    def total(self) -> Groups:
        """Adds up the whole timeline: one group, or none without any update."""
        updates, rows, workers = self.updates, self.contributions, len(self.workers)
        is_accepted, secs = rows.outcome == Outcome.ACCEPTED, rows.arrival - rows.start
        waits = np.where(is_accepted, -rows.arrival - np.repeat(updates.reduce, updates.count), 0)
        stale = np.where(is_accepted, rows.staleness, 0)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(rows.worker, values, workers)[None]

        def largest(values: np.ndarray) -> np.ndarray:
            result = np.zeros((1, workers), values.dtype)
            np.maximum.at(result[0], rows.worker, values)
            return result

        whole = Groups.of(
            begin=(updates.time - updates.opened)[:1],
            end=updates.time[-1:],
            updates=[len(updates)],
            examples=[updates.examples.sum(dtype=np.int64)],
            wait=[updates.wait.sum(dtype=np.float64)],
            reduce_secs=[updates.reduce.sum(dtype=np.float64)],
            accepted=total(is_accepted),
            dropped=total(rows.outcome == Outcome.DROPPED),
            lost=total(rows.outcome == Outcome.LOST),
            compute_secs=total(secs),
            compute_max=largest(secs),
            wait_secs=total(waits),
            held_secs=total(rows.held),
            input_secs=total(rows.input),
            staleness_sum=total(stale),
            staleness_max=largest(stale),
        )
        return whole[: len(updates)]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A file that was not read: its path below the directory of the reader, and why."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """Result of `LogReader.read`.

    Attributes:
      timelines: one for each job, by the time of its last update, the newest last.
      skipped: damaged and foreign files.
      is_new: True if anything differs from the reading before.
    """

    timelines: tuple[Timeline, ...]
    skipped: tuple[Skipped, ...]
    is_new: bool = True


class LogReader:
    """Reads the logs below a directory.

    Args:
      directory: a directory of logs, a run directory, or one above. Six levels of subdirectories are searched.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = pathlib.Path(directory)
        self._logs: dict[str, _Log] = {}
        self._seen: object = None
        self._timelines: tuple[Timeline, ...] = ()

    def read(self) -> Reading:
        """Reads what is new.

        Raises:
          OSError: the directory can't be listed.
        """
        found = find_logs(self._directory)
        self._logs = {path: self._logs.get(path) or _Log(self._directory, path) for path in found}
        for log in self._logs.values():
            log.read()
        skipped = tuple(each for log in self._logs.values() for each in log.skipped)
        seen = [(path, log.header, log.stamps) for path, log in self._logs.items()], skipped
        is_new, self._seen = seen != self._seen, seen
        if is_new:
            self._timelines = _timelines(self._logs.values())
        return Reading(self._timelines, skipped, is_new)


def read_logs(directory: str | os.PathLike[str], job: str | None = None) -> Timeline:
    """Reads all logs below a directory, once, and joins those of one job.

    Args:
      directory: a directory of logs, a run directory, or one above.
      job: identifier of the job; the one with the newest update, if it isn't given.

    Raises:
      FileNotFoundError: there is no log.
      ValueError: there is no such job.
    """
    reading = LogReader(directory).read()
    if not reading.timelines:
        reasons = "".join(f"; skipped {each.path}: {each.reason}" for each in reading.skipped[:3])
        remedy = "name the log_dir of tfdist.callbacks.Telemetry, or of --telemetry"
        raise FileNotFoundError(f"there is no update log below {os.fspath(directory)!r}{reasons}; {remedy}")
    for timeline in reversed(reading.timelines):
        if job in (None, timeline.job):
            return timeline
    jobs = ", ".join(repr(each.job) for each in reading.timelines)
    raise ValueError(f"no log below {os.fspath(directory)!r} is of this job; they are of {jobs}. Received: job={job!r}")


def find_logs(directory: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the path of each log below `directory`, "" for itself. Links to directories are not followed."""

    def check(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for path, folders, files in os.walk(directory, onerror=check):
        below = pathlib.Path(path).relative_to(directory).parts
        folders.sort()
        if HEADER in files and _DIRECTORY.fullmatch(pathlib.Path(path).resolve().name):
            yield "/".join(below)
            folders.clear()
        elif len(below) == _MAX_DEPTH:
            folders.clear()


def run_directory(timeline: Timeline) -> str:
    """Returns the path of a job's run directory, below the log directory; "" for the log directory itself."""
    return _LOG.sub("", min(timeline.headers))


class _Log:
    """Content of a log that was read.

    Attributes:
      header: content of `log.json`, once it was read.
      stamps: by the name of each segment inode, time and size of the file that was read.
    """

    def __init__(self, root: pathlib.Path, path: str) -> None:
        self.path = path
        self._directory = root / path
        self.header: Header | None = None
        self.stamps: dict[str, tuple[int, ...]] = {}
        self._content: dict[str, Segment | Exception] = {}

    @property
    def skipped(self) -> list[Skipped]:
        """The files that could not be read."""
        failed = {name: each for name, each in self._content.items() if isinstance(each, Exception)}
        return [
            Skipped(f"{self.path}/{name}".lstrip("/"), str(error) or type(error).__name__)
            for name, error in sorted(failed.items())
        ]

    @property
    def segments(self) -> list[Segment]:
        """The segments in the order of their updates."""
        return [each for _, each in sorted(self._content.items()) if isinstance(each, Segment)]

    def read(self) -> None:
        """Reads the header, if that isn't done, and segments that are new or were written again."""
        if self.header is None:
            try:
                self.header = Header.from_json((self._directory / HEADER).read_bytes())
            except (OSError, ValueError) as error:
                self._content[HEADER] = error
                return
        workers, stamps = len(self.header.workers), self._stamps()

        def read(name: str) -> Segment | Exception:
            try:
                return Segment.decoded((self._directory / name).read_bytes(), workers)
            except (OSError, ValueError) as error:
                return error

        # One that could not be read may be readable next time.
        kept = {
            name: each
            for name, each in self._content.items()
            if name in stamps and self.stamps[name] == stamps[name] and not isinstance(each, OSError)
        }
        new = [name for name in stamps if name not in kept]
        # Reading and inflating run without Python's lock.
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            found = kept | dict(zip(new, pool.map(read, new), strict=True))
        # The oldest are removed while others are read.
        self._content = {name: each for name, each in found.items() if not isinstance(each, FileNotFoundError)}
        self.stamps = {name: stamps[name] for name in self._content}

    def _stamps(self) -> dict[str, tuple[int, ...]]:
        stamps = {}
        # The whole list first: a live writer has filled a segment before it begins the next.
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    stamps[path.name] = status.st_ino, status.st_mtime_ns, status.st_size
        return stamps


def _timelines(logs: Iterable[_Log]) -> tuple[Timeline, ...]:
    """Joins the logs of each job; the job with the newest update is last."""
    jobs: dict[str, list[tuple[Header, str, Segment]]] = {}
    for log in logs:
        if log.header is not None:
            jobs.setdefault(log.header.job, []).append((log.header, log.path, Segment.joined(log.segments)))
    found = [_timeline(job, each) for job, each in jobs.items()]
    return tuple(sorted(found, key=lambda each: each.origin_secs + each.span[1]))


def _timeline(job: str, logs: list[tuple[Header, str, Segment]]) -> Timeline:
    logs.sort(key=lambda each: (each[0].origin_secs + (each[2].updates.time[:1].sum()), each[1]))
    # "worker:10" comes behind "worker:9".
    natural = lambda name: re.sub(r"\d+", lambda number: number[0].zfill(12), name)  # noqa: E731
    workers = tuple(sorted({name for header, *_ in logs for name in header.workers}, key=natural))
    origin = logs[0][0].origin_secs
    whole = Segment.joined([_placed(part, header, workers, header.origin_secs - origin) for header, _, part in logs])
    return Timeline(
        job=job,
        headers={path: header for header, path, _ in logs},
        workers=workers,
        origin_secs=origin,
        left_out=sum(part.first for *_, part in logs),
        updates=whole.updates,
        contributions=whole.contributions,
        events=whole.events[np.argsort(whole.events.event_time, kind="stable")],
        scalars=whole.scalars[np.argsort(whole.scalars.scalar_time, kind="stable")],
    )


def _placed(part: Segment, header: Header, workers: Sequence[str], shift: float) -> Segment:
    """Returns a log with the times and the workers of the timeline."""
    index = np.array([workers.index(name) for name in header.workers], np.int64)
    events = part.events
    known = (events.event_worker >= 0) & (events.event_worker < len(index))
    return dataclasses.replace(
        part,
        updates=part.updates.replace(time=part.updates.time + shift),
        contributions=part.contributions.replace(worker=index[part.contributions.worker]),
        events=events.replace(
            event_time=events.event_time + shift,
            event_worker=np.where(known, index[np.where(known, events.event_worker, 0)], -1),
        ),
        scalars=part.scalars.replace(scalar_time=part.scalars.scalar_time + shift),
    )
