# SPDX-License-Identifier: Apache-2.0
"""Writes the update log of one task: what is added is kept in memory, and a thread writes it as segments.

Files are `log.json` and segments in the order of their names. The last segment is written anew with each flush, until
it is full; a full one never changes. Each is written under another name and renamed, so that it appears whole.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np

from tfdist import _files, _forks
from tfdist.telemetry.update_log.columns import (
    FULL,
    SUFFIX,
    Contributions,
    EventKind,
    Events,
    Header,
    Scalars,
    Segment,
    UpdateRecord,
    Updates,
    of_records,
)

_LOGGER = logging.getLogger("tfdist")
_MAX_TEXT = 500
# Rows that wait for a disk that does not answer; beyond that the oldest are left out.
_MAX_PENDING = 2_000_000
_CLOSE_SECS = 30.0
HEADER = "log.json"


class LogWriter:
    """Writes a log. Any thread may call it; no method but `flush` and `close` waits for the disk.

    A thread writes every `flush_secs`. An error of the disk is one warning, and the next flush tries again. Beyond two
    million gradients in memory the oldest updates are left out, with a warning.

    Args:
      directory: `updates` in a run directory. An existing log, of an earlier training or before a restart, is left
        alone. This one is written to `updates_2`, `updates_3` and so on.
      header: content of `log.json`.
      flush_secs: time between two writes.
      max_contributions: gradients that the log keeps; beyond it, the oldest segments are removed.
      clock: seconds on the clock of the log, for events without a time.
      warn: called with a line when the disk fails.
      zero_secs: second 0 of the log (`header.origin_secs`) on the clock of all times that the methods receive.

    Attributes:
      directory: the directory of this log. It is known after the first flush.
    """

    def __init__(
        self,
        directory: str,
        header: Header,
        flush_secs: float = 5.0,
        max_contributions: int = 8_000_000,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = _LOGGER.warning,
        zero_secs: float = 0.0,
    ) -> None:
        if not flush_secs > 0:
            raise ValueError(f"LogWriter(flush_secs=...) must be over 0. Received: flush_secs={flush_secs!r}")
        self.directory = self._base = directory
        self._header = header
        self._flush_secs = flush_secs
        self._max_contributions = max_contributions
        self._clock = clock
        self._warn = warn
        self._zero_secs = zero_secs
        self._has_warned = self._has_left_out = False
        # Guards what was added since the last flush.
        self._lock = threading.Lock()
        self._added: list[tuple[Updates, Contributions]] = []
        self._num_added = 0
        self._events: list[tuple[float, int, int, str, float]] = []
        self._scalars: list[tuple[float, int, str, float]] = []
        # Guards the disk, and what is not in a full segment yet.
        self._writing = threading.Lock()
        self._is_begun = self._is_written = False
        self._last = Segment.joined([])
        self._serial = 1
        # Full segments: path and number of gradients, the oldest first.
        self._full: collections.deque[tuple[pathlib.Path, int]] = collections.deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist update log", daemon=True)
        self._thread.start()
        _forks.at_exit(self.close)

    def add(self, *records: UpdateRecord) -> None:
        """Adds updates."""
        self.add_columns(*of_records(records))

    def add_columns(self, updates: Updates, contributions: Contributions) -> None:
        """Adds updates as columns; their times are on the clock of `add`."""
        updates = updates.replace(time=updates.time - self._zero_secs)
        with self._lock:
            self._added.append((updates, contributions))
            self._num_added += len(updates) + len(contributions)
            if self._num_added > _MAX_PENDING:
                # Forgets the older half of what was added since the last flush.
                del self._added[: -(-len(self._added) // 2)]
                self._num_added = sum(len(updates) + len(rows) for updates, rows in self._added)
                self._has_left_out = True

    def event(
        self, kind: EventKind, text: str = "", worker: int = -1, time: float | None = None, secs: float = 0.0
    ) -> None:
        """Adds an event.

        Args:
          kind: what happened.
          text: a line for people.
          worker: index of the worker; -1: the policy, or all workers.
          time: when it began, on the clock of the log; now, if it isn't given.
          secs: how long it took.
        """
        moment = (self._clock() if time is None else time) - self._zero_secs
        with self._lock:
            self._events.append((moment, worker, int(kind), str(text)[:_MAX_TEXT], secs))

    def scalar(self, name: str, step: int, value: float, time: float | None = None) -> None:
        """Adds a measurement; see `Scalars`."""
        moment = (self._clock() if time is None else time) - self._zero_secs
        with self._lock:
            self._scalars.append((moment, step, name, value))

    def flush(self) -> None:
        """Writes all that was added."""
        with self._writing:
            try:
                if self._take():
                    self._write()
            except Exception as error:
                # Telemetry never ends a training, whatever a file system raises.
                problem = getattr(error, "strerror", None) or repr(error)
                self._warn_once(f"the update log in {self.directory} can't be written, and is tried again: {problem}")
                self._is_written = False

    def close(self) -> None:
        """Writes all that was added and ends the thread; waits at most 30 s for the disk."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"the disk of the update log in {self.directory} didn't answer for {_CLOSE_SECS:.0f} s")
        _forks.not_at_exit(self.close)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.flush()
            self._closed.wait(self._flush_secs)
        self.flush()

    def _take(self) -> bool:
        """Moves what was added into the last segment; returns False if nothing is to be written."""
        with self._lock:
            added, self._added, self._num_added = self._added, [], 0
            events, self._events = self._events, []
            scalars, self._scalars = self._scalars, []
        if not (added or events or scalars or not self._is_written):
            return False
        new = Segment(
            0,
            Updates.concatenated([each for each, _ in added]),
            Contributions.concatenated([each for _, each in added]),
            Events.of_rows(events),
            Scalars.of_rows(scalars),
        )
        self._last = Segment.joined([self._last, new])
        while len(self._last.contributions) + len(self._last.updates) > _MAX_PENDING:
            newest = self._last.cut(-(-len(self._last.updates) // 2))[1]
            self._last = dataclasses.replace(newest, events=self._last.events, scalars=self._last.scalars)
            self._has_left_out = True
        return True

    def _write(self) -> None:
        if self._has_left_out:
            self._warn_once(f"the disk is too slow for the update log in {self.directory}: updates were left out")
        if not self._is_begun:
            self._begin()
        while self._last.is_full:
            fitting = np.searchsorted(self._last.updates.offsets, FULL["contributions"], "right") - 1
            head, tail = self._last.cut(int(min(max(1, fitting), FULL["updates"], len(self._last.updates))))
            self._full.append((self._write_segment(head), len(head.contributions)))
            self._last, self._serial = tail, self._serial + 1
        if len(self._last.updates) or len(self._last.events) or len(self._last.scalars):
            self._write_segment(self._last)
        kept = len(self._last.contributions) + sum(count for _, count in self._full)
        while self._full and kept > self._max_contributions:
            self._full[0][0].unlink(missing_ok=True)
            kept -= self._full.popleft()[1]
        self._is_written = True

    def _begin(self) -> None:
        """Makes the directory: the given name if it is free, else with _2, _3 and so on; making it is the claim."""
        for number in itertools.count(1):
            path = self._base if number == 1 else f"{self._base}_{number}"
            try:
                pathlib.Path(path).mkdir(parents=True)
                break
            except FileExistsError:
                if not pathlib.Path(path).is_dir():
                    raise
        self.directory = path
        _files.write(f"{path}/{HEADER}", self._header.to_json(), permissions=0o644)
        self._is_begun = True

    def _write_segment(self, segment: Segment) -> pathlib.Path:
        path = pathlib.Path(self.directory, f"{self._serial:010d}{SUFFIX}")
        try:
            _files.write(str(path), segment.encoded(), permissions=0o644)
        except FileNotFoundError:
            # Somebody has removed the directory: the next flush begins another.
            self._is_begun = False
            self._full.clear()
            raise
        return path

    def _warn_once(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(line)
