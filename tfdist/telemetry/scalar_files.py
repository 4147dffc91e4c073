# SPDX-License-Identifier: Apache-2.0
"""Reads the scalars that the Telemetry callback writes, for watch and the page. No TensorFlow.

Both kinds of files are TFRecord files: for each record its length, a checksum, an `Event` proto, and a checksum. Those
of single tasks have no "tfevents" in their name, so that TensorBoard lists one training as few runs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfdist.telemetry.update_log import Files

MARK = ".tfdist"
SENT, RECEIVED = "tfdist/network/sent_bytes_per_sec", "tfdist/network/received_bytes_per_sec"
LOSS = "tfdist/logs/loss"
_TASK = re.compile(r"(workers/worker|ps/ps)_(\d{1,9})")
# Besides those of the tasks.
_RUNS = ("", "tfdist", "train", "tfdist_train", "validation", "tfdist_validation")
_HEADER, _FOOTER = 12, 4
_MAX_RECORD = 1 << 26
# Of more points of a tag every other one is forgotten.
_MOST_POINTS = 4_000
# Field numbers: Event.wall_time, Event.step, Event.summary, Summary.value, Value.tag, Value.simple_value.
_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE_VALUE = 1, 2, 5, 1, 1, 2


class Point(NamedTuple):
    """A value of a scalar."""

    wall_time: float
    step: int
    value: float


# Points of each tag, by directory below the run's.
Scalars = Mapping[str, Mapping[str, list[Point]]]


class ScalarFiles:
    """Reads what is new in the files of a run.

    Args:
      run: the run's directory.
      files: its file system.
      tags: the tags that are kept.
    """

    def __init__(self, run: str, files: Files, tags: frozenset[str] = frozenset((SENT, RECEIVED, LOSS))) -> None:
        self._run = run.rstrip("/")
        self._files = files
        self._tags = {tag.encode(): tag for tag in tags}
        self._offsets: dict[str, int] = {}
        self._found: dict[str, dict[str, list[Point]]] = {}

    def read(self) -> Scalars:
        """Returns all points so far; a file that can't be read has none."""
        for folder in (*_RUNS, *self._tasks()):
            for name in self._entries(folder)[1]:
                if name.endswith(MARK):
                    self._read(folder, f"{self._run}/{folder}/{name}" if folder else f"{self._run}/{name}")
        return self._found

    def _tasks(self) -> Iterator[str]:
        for parent in ("workers", "ps"):
            for name in self._entries(parent)[0]:
                if task_of(f"{parent}/{name}"):
                    yield f"{parent}/{name}"

    def _entries(self, folder: str) -> tuple[list[str], list[str]]:
        try:
            return self._files.entries(f"{self._run}/{folder}" if folder else self._run)
        except OSError:
            return [], []

    def _read(self, folder: str, path: str) -> None:
        offset = self._offsets.get(path, 0)
        try:
            data = self._files.read(path, offset)
        except OSError:
            return
        for end, record in _records(data):
            self._offsets[path] = offset + end
            try:
                self._add(folder, record)
            except (ValueError, IndexError, struct.error):
                continue

    def _add(self, folder: str, event: bytes) -> None:
        """Adds the values of an `Event`."""
        wall_time, step, summaries = 0.0, 0, []
        for field, value in _fields(event):
            if field == _WALL_TIME and isinstance(value, bytes):
                (wall_time,) = struct.unpack("<d", value)
            elif field == _STEP and isinstance(value, int):
                step = value
            elif field == _SUMMARY and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for number, value in _fields(summary):
                members = dict(_fields(value)) if number == _VALUE and isinstance(value, bytes) else {}
                name, data = members.get(_TAG), members.get(_SIMPLE_VALUE)
                tag = self._tags.get(name) if isinstance(name, bytes) else None
                if tag is not None and isinstance(data, bytes) and len(data) == 4:
                    points = self._found.setdefault(folder, {}).setdefault(tag, [])
                    points.append(Point(wall_time, step, *struct.unpack("<f", data)))
                    if len(points) > _MOST_POINTS:
                        del points[1:-1:2]


def task_of(folder: str) -> str | None:
    """Returns the task whose values a directory has, such as "worker:3" of "workers/worker_03"; None if it has none."""
    match = _TASK.fullmatch(folder)
    return f"{'ps' if folder.startswith('ps') else 'worker'}:{int(match[2])}" if match else None


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields each whole record, and where it ends. The last one may be incomplete yet."""
    place = 0
    while place + _HEADER <= len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        end = place + _HEADER + length + _FOOTER
        if length > _MAX_RECORD or end > len(data):
            return  # The file is damaged, or unfinished, from here on.
        yield end, data[place + _HEADER : place + _HEADER + length]
        place = end


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yields the number of each field of a proto, and its integer or its bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        shift, place = shift + 7, place + 1
        if byte < 128:
            return value, place
