# SPDX-License-Identifier: Apache-2.0
"""Reads all update logs below a directory, again and again: only segments that are new are read from the disk."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterator

from tfdist.telemetry.update_log import segments
from tfdist.telemetry.update_log.records import Header
from tfdist.telemetry.update_log.segments import Files, LocalFiles
from tfdist.telemetry.update_log.timeline import Log, Timeline, merged

_DIRECTORY = re.compile(r"updates(_\d+)?")
_MAX_DEPTH = 6
_HEADER = "log.json"
# A segment may be replaced between the listing of its directory and its reading.
_ATTEMPTS = 3
_THREADS = 4


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
      files: file system of `directory`.
    """

    def __init__(self, directory: str | os.PathLike[str], files: Files | None = None) -> None:
        self._directory = os.fspath(directory).rstrip("/") or "/"
        self._files = files or LocalFiles()
        self._logs: dict[str, _Log] = {}
        self._seen: object = None
        self._timelines: tuple[Timeline, ...] = ()

    def read(self) -> Reading:
        """Reads what is new.

        Raises:
          OSError: the directory can't be listed.
        """
        found = dict(find_logs(self._directory, self._files))
        self._logs = {path: self._logs.get(path) or _Log(self._directory, path, self._files) for path in found}
        for log in self._logs.values():
            log.read()
        skipped = tuple(each for log in self._logs.values() for each in log.skipped.values())
        # Segments have unique names in their directory, and are never changed.
        seen = [(path, log.header, sorted(log.content)) for path, log in self._logs.items()], skipped
        is_new, self._seen = seen != self._seen, seen
        if is_new:
            logs = [log.whole(log.header) for log in self._logs.values() if log.header is not None]
            self._timelines = merged(logs)
        return Reading(self._timelines, skipped, is_new)


def read_logs(directory: str | os.PathLike[str], job: str | None = None, files: Files | None = None) -> Timeline:
    """Reads all logs below a directory, once, and merges those of one job.

    Args:
      directory: a directory of logs, a run directory, or one above.
      job: identifier of the job; the one with the newest update, if it isn't given.
      files: file system of `directory`.

    Raises:
      FileNotFoundError: there is no log.
      ValueError: there is no such job.
    """
    reading = LogReader(directory, files).read()
    if not reading.timelines:
        reasons = "".join(f"; skipped {each.path}: {each.reason}" for each in reading.skipped[:3])
        raise FileNotFoundError(f"there is no update log below {os.fspath(directory)!r}{reasons}")
    for timeline in reversed(reading.timelines):
        if job in (None, timeline.job):
            return timeline
    jobs = ", ".join(repr(each.job) for each in reading.timelines)
    raise ValueError(f"no log below {os.fspath(directory)!r} is of this job; they are of {jobs}. Received: job={job!r}")


def find_logs(directory: str, files: Files) -> Iterator[tuple[str, list[str]]]:
    """Yields each log's path below `directory`, "" for itself, and the names of its files."""
    pending = [("", 0)]
    while pending:
        path, depth = pending.pop()
        subdirectories, names = files.entries(_join(directory, path))
        if _HEADER in names and _DIRECTORY.fullmatch((path or os.path.basename(directory)).rpartition("/")[2]):  # noqa: PTH119
            yield path, names
        elif depth < _MAX_DEPTH:
            pending += [(f"{path}/{each}" if path else each, depth + 1) for each in reversed(subdirectories)]


class _Log:
    """Content of a log that was read."""

    def __init__(self, root: str, path: str, files: Files) -> None:
        self._path = path
        self._directory = _join(root, path)
        self._files = files
        self.header: Header | None = None
        self.content: dict[str, segments.Segment] = {}
        self.skipped: dict[str, Skipped] = {}
        # Segments never change, so a damaged one stays so; one that could not be read may be readable next time.
        self._damaged: set[str] = set()

    def read(self) -> None:
        """Reads the header, if that isn't done, and segments that are new."""
        if self.header is None:
            try:
                self.header = Header.from_json(self._files.read(f"{self._directory}/{_HEADER}"))
                self.skipped.pop(_HEADER, None)
            except (OSError, ValueError) as error:
                self._skip(_HEADER, error)
                return
        for last in range(_ATTEMPTS - 1, -1, -1):
            names = {each for each in self._files.entries(self._directory)[1] if segments.is_segment(each)}
            gone = self._read_new(names, len(self.header.workers), is_last=not last)
            self.content = {name: each for name, each in self.content.items() if name in names}
            self.skipped = {name: each for name, each in self.skipped.items() if name in names}
            if not gone:
                break

    def whole(self, header: Header) -> Log:
        """Returns the segments in the order of their updates, without replaced ones."""
        replaced = set(itertools.chain.from_iterable(each.replaces for each in self.content.values()))
        kept = [(each.first, segments.kind_and_serial(name)[1], each) for name, each in self.content.items()]
        ordered = sorted((each for each in kept if each[1] not in replaced), key=lambda each: each[:2])
        content = [each[2] for each in ordered]
        return Log(
            self._path,
            header,
            [each for each in content if isinstance(each, segments.Summary)],
            [each for each in content if isinstance(each, segments.Detail)],
        )

    def _read_new(self, names: set[str], workers: int, is_last: bool) -> bool:
        """Reads segments; returns True if some have vanished, because others have replaced them."""
        gone = False
        new = sorted(names - self.content.keys() - self._damaged)
        # Reading and inflating run without Python's lock.
        with concurrent.futures.ThreadPoolExecutor(_THREADS if len(new) > 1 else 1) as pool:
            for name, read in zip(new, pool.map(functools.partial(self._segment, workers), new), strict=True):
                if isinstance(read, segments.Segment):
                    self.content[name] = read
                    self.skipped.pop(name, None)
                elif isinstance(read, OSError) and not is_last:
                    gone = True
                else:
                    self._skip(name, read)
                    if not isinstance(read, OSError):
                        self._damaged.add(name)
        return gone

    def _segment(self, workers: int, name: str) -> segments.Segment | Exception:
        try:
            data = self._files.read(f"{self._directory}/{name}")
            return segments.decode(segments.kind_and_serial(name)[0], data, workers)
        except (OSError, ValueError) as error:
            return error

    def _skip(self, name: str, error: Exception) -> None:
        self.skipped[name] = Skipped(f"{self._path}/{name}".lstrip("/"), str(error) or type(error).__name__)


def _join(directory: str, path: str) -> str:
    return f"{directory}/{path}" if path else directory
