# SPDX-License-Identifier: Apache-2.0
"""Writes the update log of one task: records are kept in memory, and a thread writes them as segments."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist import _forks
from tfdist.telemetry.update_log import segments
from tfdist.telemetry.update_log.columns import Contributions, Events, Updates
from tfdist.telemetry.update_log.records import EventKind, Header, UpdateRecord
from tfdist.telemetry.update_log.segments import Files, LocalFiles

_LOGGER = logging.getLogger("tfdist")
_MAX_PENDING = 2_000_000
# NumPy converts this many gradients at once in about a millisecond, in which no other thread runs.
_BLOCK = 4096
_CLOSE_SECS = 30.0


class LogWriter:
    """Writes a log. Any thread may call it; no method but `flush` and `close` waits for the disk.

    A thread writes every `flush_secs`. An error of the disk is one warning, and the next flush tries again. Beyond two
    million gradients in memory the oldest updates are left out, with a warning.

    Args:
      directory: `updates` in a run directory. An existing log, of an earlier training or before a restart, is left
        alone. This one is written to `updates_2`, `updates_3` and so on.
      header: content of `log.json`.
      files: file system of `directory`.
      flush_secs: time between two writes.
      max_contributions: gradients that are kept one by one; older updates are aggregated.
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
        files: Files | None = None,
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
        self._files = files or LocalFiles()
        self._flush_secs = flush_secs
        self._max_contributions = max_contributions
        self._clock = clock
        self._warn = warn
        self._zero_secs = zero_secs
        self._warned = False
        # Guards what `add` and `event` append to.
        self._lock = threading.Lock()
        self._records: list[UpdateRecord | _Rows] = []
        self._gradients = 0
        self._events: list[tuple[float, int, int, str, float]] = []
        self._left_out = 0
        # Guards the disk.
        self._writing = threading.Lock()
        self._store: Store | None = None
        self._blocks: list[segments.Detail] = []
        self._num_updates = 0
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tfdist update log", daemon=True)
        self._thread.start()
        _forks.at_exit(self.close)

    def add(self, record: UpdateRecord) -> None:
        """Adds an update."""
        with self._lock:
            self._records.append(record)
            self._gradients += len(record.contributions)
            if self._gradients > _MAX_PENDING:
                self._leave_out()

    def add_columns(self, updates: Updates, contributions: Contributions) -> None:
        """Adds updates, each of equally many gradients; their times are on the clock of `add`."""
        updates = updates.replace(time=updates.time - self._zero_secs)
        count, width = len(updates), len(contributions) // max(1, len(updates))
        cuts = [*range(0, count, max(1, _BLOCK // (width + 1))), count]
        with self._lock:
            for begin, end in itertools.pairwise(cuts):
                self._records.append(_Rows(updates[begin:end], contributions[begin * width : end * width]))
            self._gradients += len(contributions)
            if self._gradients > _MAX_PENDING:
                self._leave_out()

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
        moment = self._clock() if time is None else time
        with self._lock:
            self._events.append((moment, worker, int(kind), str(text)[: segments.MAX_TEXT], secs))
            del self._events[: -segments.MAX_EVENTS]

    def flush(self) -> None:
        """Writes all that was added."""
        with self._writing:
            try:
                self._write()
            except Exception as error:
                # Telemetry never ends a training, whatever a file system raises.
                self._warn_once(f"the update log in {self.directory} can't be written, and is tried again: {error!r}")

    def close(self) -> None:
        """Writes all that was added and ends the thread; waits at most 30 s for the disk."""
        self._closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"the disk of the update log in {self.directory} didn't answer for {_CLOSE_SECS:.0f} s")
        _forks.not_at_exit(self.close)

    def _run(self) -> None:
        while not self._closed:
            self.flush()
            self._wake.wait(self._flush_secs)
        self.flush()

    def _leave_out(self) -> None:
        """Forgets the older half of what waits for the disk."""
        half = len(self._records) // 2
        self._left_out += half
        del self._records[:half]
        self._gradients = sum(len(each.contributions) for each in self._records)

    def _write(self) -> None:
        self._drain()
        if self._store is None:
            self._store = Store.begin(self._base, self._header, self._files, self._max_contributions)
            self.directory = self._store.directory
        try:
            while self._blocks:
                self._store.append(self._blocks[0])
                del self._blocks[0]
                self._store.tidy()
        except FileNotFoundError:
            # Somebody has removed the directory: the next flush begins another.
            self._store = None
            raise
        if self._left_out:
            self._warn_once(f"the disk is too slow for the update log in {self.directory}: updates were left out")

    def _drain(self) -> None:
        """Moves what was added into `_blocks`, as columns."""
        with self._lock:
            records, self._records, self._gradients = self._records, [], 0
            events, self._events = self._events, []
        for columns in _blocks(records, self._zero_secs):
            self._blocks.append(segments.Detail(self._num_updates, *columns, Events.empty()))
            self._num_updates += len(columns.updates)
        if events:
            columns = _events(events, self._zero_secs)
            nothing = segments.Detail(self._num_updates, Updates.empty(), Contributions.empty(), columns)
            self._blocks.append(nothing)
        if len(self._blocks) > 1:
            self._blocks = _filled(self._blocks)
        while sum(len(each.contributions) for each in self._blocks[1:]) > _MAX_PENDING:
            self._left_out += self._blocks[0].num_updates
            del self._blocks[0]

    def _warn_once(self, line: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(line)


class _Rows(NamedTuple):
    """Updates as columns, on the clock of the log."""

    updates: Updates
    contributions: Contributions


def _blocks(records: Sequence[UpdateRecord | _Rows], zero_secs: float) -> list[_Rows]:
    """Returns records as blocks of about `_BLOCK` gradients, in their order."""
    found: list[_Rows] = []
    for is_block, group in itertools.groupby(records, lambda each: isinstance(each, _Rows)):
        given: Any = list(group)
        if is_block:
            found += given
            continue
        sizes = np.fromiter((len(each.contributions) + 1 for each in given), np.int64, len(given))
        block = np.cumsum(sizes) // _BLOCK
        cuts = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(given)]
        found += [
            _Rows(*_columns(given[begin:end], zero_secs)) for begin, end in itertools.pairwise(cuts) if end > begin
        ]
    return found


def _columns(records: Sequence[UpdateRecord], zero_secs: float) -> tuple[Updates, Contributions]:
    counts = np.array([len(each.contributions) for each in records], np.int32)
    rows = [(*each[:6], each.reduce) for each in records]
    step, moment, opened, wait, examples, phase, reduce = np.array(rows, np.float64).reshape(-1, 7).T
    after = moment - zero_secs
    updates = Updates.of(
        step=step, time=after, opened=opened, wait=wait, examples=examples, phase=phase, count=counts, reduce=reduce
    )
    gradients = itertools.chain.from_iterable(each.contributions for each in records)
    # Fields with a default may be left away.
    flat = itertools.chain.from_iterable(each if len(each) == 8 else (*each, 0.0) for each in gradients)
    total = int(counts.sum())
    worker, start, arrival, outcome, staleness, weight, held, inputs = (
        np.fromiter(flat, np.float64, 8 * total).reshape(total, 8).T
    )
    made = np.repeat(moment, counts)
    contributions = Contributions.of(
        worker=worker,
        start=start - made,
        arrival=arrival - made,
        outcome=outcome,
        staleness=np.minimum(staleness, np.iinfo(np.uint16).max),
        weight=weight,
        held=held,
        input=inputs,
    )
    return updates, contributions


def _events(rows: Sequence[tuple[float, int, int, str, float]], zero_secs: float) -> Events:
    moment, worker, kind, text, secs = zip(*rows, strict=True)
    after = np.asarray(moment) - zero_secs
    return Events.of(event_time=after, event_worker=worker, event_kind=kind, event_text=text, event_secs=secs)


def _filled(blocks: list[segments.Detail]) -> list[segments.Detail]:
    """Joins blocks, as long as they fit into a segment together."""
    filled: list[list[segments.Detail]] = []
    updates, gradients = 0, 0
    for block in blocks:
        updates += block.num_updates
        gradients += len(block.contributions)
        if not filled or updates > segments.MAX_UPDATES or gradients > segments.MAX_CONTRIBUTIONS:
            filled.append([])
            updates, gradients = block.num_updates, len(block.contributions)
        filled[-1].append(block)
    return [segments.Detail.joined(each) for each in filled]


# Files of a log while it is written: joins short segments, aggregates old ones, removes what they replace.


# So many files of one size become one file of the next size.
_FAN = 8
_MAX_SUMMARIES = 64


@dataclasses.dataclass
class _File:
    """A segment on the disk. `size` counts how often its updates were rewritten."""

    name: str
    size: int
    updates: int
    contributions: int = 0
    content: segments.Detail | None = None


class Store:
    """A log's directory. `append` adds a segment; the directory then has everything, at every moment.

    Each update is rewritten at most three times while it is kept in detail: short segments are joined by eight until
    one is full. Beyond `max_contributions`, full segments are replaced by groups of 64 steps. Beyond 64 files of one
    size, these are replaced by groups of 4,096 steps in an eighth as many files.
    """

    def __init__(self, directory: str, header: Header, files: Files, max_contributions: int) -> None:
        self.directory = directory
        self._workers = len(header.workers)
        self._files = files
        self._max_contributions = max_contributions
        self._serial = 0
        # Segments that aren't full yet, then full ones, then summaries by size; each in the order of their updates.
        self._short: list[_File] = []
        self._full: list[_File] = []
        self._summaries: list[list[_File]] = [[]]
        # Files that were replaced and not removed yet, oldest first.
        self._replaced: list[str] = []

    @classmethod
    def begin(cls, directory: str, header: Header, files: Files, max_contributions: int) -> Store:
        """Makes a log's directory: the given name if it is free, else with _2, _3 and so on."""
        for number in itertools.count(1):
            path = directory if number == 1 else f"{directory}_{number}"
            if files.claim_directory(path):
                break
        files.write(f"{path}/log.json", header.to_json())
        return cls(path, header, files, max_contributions)

    def append(self, block: segments.Detail) -> None:
        """Writes a segment behind all others. If it raises, nothing was written."""
        file = _File("", 0, block.num_updates, len(block.contributions), block)
        if self._short and not _fits([*self._short, file]):
            self._finish()
        file.name = self._write(block)
        self._short.append(file)

    def tidy(self) -> None:
        """Joins short segments, aggregates old ones, and removes what was replaced."""
        self._join()
        self._aggregate()
        self._clean()

    def _finish(self) -> None:
        """Makes one full segment of the short ones."""
        self._full.append(self._joined(self._short, content=False))
        self._short = []

    def _join(self) -> None:
        """Joins the last eight short segments of equal size, again and again."""
        while len(self._short) >= _FAN and len({each.size for each in self._short[-_FAN:]}) == 1:
            self._short[-_FAN:] = [self._joined(self._short[-_FAN:], content=True)]
        if self._short and not _fits(self._short, margin=True):
            self._finish()

    def _joined(self, files: list[_File], content: bool) -> _File:
        if len(files) == 1:
            return dataclasses.replace(files[0], content=files[0].content if content else None)
        parts = [each.content for each in files if each.content is not None]
        whole = segments.Detail.joined(parts)
        name = self._write(whole, files)
        kept = whole if content else None
        return _File(name, files[0].size + 1, whole.num_updates, len(whole.contributions), kept)

    def _aggregate(self) -> None:
        kept = sum(each.contributions for each in (*self._full, *self._short))
        while kept > self._max_contributions and self._full:
            oldest = self._full[0]
            kept -= oldest.contributions
            detail = self._read("detail", oldest)
            if isinstance(detail, segments.Detail):
                name = self._write(detail.summarized(self._workers), [oldest])
                self._summaries[0].append(_File(name, 0, detail.num_updates))
            del self._full[0]
        for size in itertools.count():
            if size == len(self._summaries) or len(self._summaries[size]) <= _MAX_SUMMARIES:
                break
            self._coarsen(size)

    def _coarsen(self, size: int) -> None:
        oldest = self._summaries[size][:_FAN]
        read = [self._read("summary", each) for each in oldest]
        parts = [each for each in read if isinstance(each, segments.Summary)]
        if parts:
            whole = segments.Summary.joined(parts)
            name = self._write(whole, oldest)
            if size + 1 == len(self._summaries):
                self._summaries.append([])
            self._summaries[size + 1].append(_File(name, size + 1, whole.num_updates))
        del self._summaries[size][:_FAN]

    def _read(self, kind: str, file: _File) -> segments.Segment | None:
        """Reads a segment of our own; None if somebody has removed or damaged it."""
        try:
            return segments.decode(kind, self._files.read(f"{self.directory}/{file.name}"), self._workers)
        except (FileNotFoundError, ValueError):
            return None

    def _write(self, segment: segments.Segment, replaced: Sequence[_File] = ()) -> str:
        """Writes a segment under a new name, which it returns; the replaced files are removed later."""
        name = segments.file_name("detail" if isinstance(segment, segments.Detail) else "summary", self._serial + 1)
        whole = dataclasses.replace(
            segment, replaces=tuple(segments.kind_and_serial(each.name)[1] for each in replaced)
        )
        self._files.write(f"{self.directory}/{name}", segments.encode(whole))
        self._serial += 1
        self._replaced += [each.name for each in replaced]
        return name

    def _clean(self) -> None:
        while self._replaced:
            self._files.remove(f"{self.directory}/{self._replaced[0]}")
            del self._replaced[0]


def _fits(files: list[_File], margin: bool = False) -> bool:
    """Returns True if the files fit into one segment; with `margin`, if an eighth more would fit."""
    factor = 1.125 if margin else 1.0
    updates, gradients = sum(each.updates for each in files), sum(each.contributions for each in files)
    return factor * updates <= segments.MAX_UPDATES and factor * gradients <= segments.MAX_CONTRIBUTIONS
