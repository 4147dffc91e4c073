# SPDX-License-Identifier: Apache-2.0
"""Files of a log while it is written: joins short segments, aggregates old ones, removes what they replace."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from tfdist.update_log import segments
from tfdist.update_log.files import Files
from tfdist.update_log.records import Header

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

    Each update is rewritten at most three times as long as it is kept in detail: short segments are joined by eight
    until one is full. Beyond `max_contributions`, full segments are replaced by groups of 64 steps, and those, beyond
    64 files of one size, by groups of 4,096 steps in an eighth as many files.
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
        name = segments.name("detail" if isinstance(segment, segments.Detail) else "summary", self._serial + 1)
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
