# SPDX-License-Identifier: Apache-2.0
"""Bytes that each worker sends per second, from TensorBoard's event files of its run directory. No TensorFlow.

An event file is a TFRecord file: for each record its length, a checksum, an `Event` proto, and a checksum.
"""

from __future__ import annotations

import collections
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping

TAG = b"tfdist/network/sent_bytes_per_sec"
_WORKER = re.compile(r"worker_(\d+)")
_HEADER, _FOOTER = 12, 4
_MAX_RECORD = 1 << 26
# Records from the end of a file in which the tag is looked for.
_LATEST = 8
# Field numbers: Event.summary, Summary.value, Value.tag, Value.simple_value.
_SUMMARY, _VALUE, _TAG, _SIMPLE_VALUE = 5, 1, 1, 2


class SentBytes:
    """Reads what is new in the event files of a run.

    Args:
      run: the run's directory.
    """

    def __init__(self, run: pathlib.Path) -> None:
        self._run = run
        self._files: dict[pathlib.Path, _EventFile] = {}

    def read(self) -> Mapping[str, float]:
        """Returns the latest value of each worker that has one."""
        found = {}
        try:
            folders = sorted(each for each in (self._run / "workers").iterdir() if _WORKER.fullmatch(each.name))
        except OSError:
            return {}
        for folder in folders:
            try:
                path = max(folder.glob("*tfevents*"), key=lambda each: each.name, default=None)
                value = self._files.setdefault(path, _EventFile(path)).latest() if path else None
            except OSError:
                continue
            if value is not None:
                found[f"worker:{int(folder.name.partition('_')[2])}"] = value
        return found


class _EventFile:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset = 0
        self._value: float | None = None

    def latest(self) -> float | None:
        """Returns the last value of the tag, or None. The last record may be incomplete yet."""
        records: collections.deque[bytes] = collections.deque(maxlen=_LATEST)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while len(header := file.read(_HEADER)) == _HEADER:
                length = int.from_bytes(header[:8], "little")
                if length > _MAX_RECORD:
                    break  # The file is damaged from here on.
                data = file.read(length + _FOOTER)
                if len(data) < length + _FOOTER:
                    break
                self._offset += _HEADER + length + _FOOTER
                records.append(data[:length])
        for record in reversed(records):
            try:
                value = next((each for each in _values(record)), None)
            except (ValueError, IndexError, struct.error):
                continue
            if value is not None:
                self._value = value
                break
        return self._value


def _values(event: bytes) -> Iterator[float]:
    """Yields the tag's values in an `Event`."""
    for field, summary in _fields(event):
        if field != _SUMMARY:
            continue
        for number, value in _fields(summary):
            members = dict(_fields(value)) if number == _VALUE else {}
            if members.get(_TAG) == TAG and len(members.get(_SIMPLE_VALUE, b"")) == 4:
                yield struct.unpack("<f", members[_SIMPLE_VALUE])[0]


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each field of a proto that is no integer."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            _, place = _varint(data, place)
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
