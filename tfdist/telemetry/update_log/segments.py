# SPDX-License-Identifier: Apache-2.0
"""Segments of an update log: their names, and their bytes, which are checked as if a stranger had written them."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import re
import tokenize
import zipfile
import zlib
from typing import Protocol, TypeVar

import numpy as np

from tfdist import _files
from tfdist.telemetry.update_log import summary
from tfdist.telemetry.update_log.columns import Columns, Contributions, Events, Groups, Updates

# Access to files for the update log: the protocol `Files`, and its implementation for local disks.


class Files(Protocol):
    """File system that holds logs: a local disk, an object store through `tf.io.gfile`, or TensorBoard's own access.

    Paths are strings whose parts are joined by "/". Errors are `OSError`.
    """

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Writes a file so that no reader ever sees a part of it."""
        ...

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        ...

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if another writer has it."""
        ...


class LocalFiles:
    """Files of a local disk. Links to directories are not followed, so that nothing outside is read."""

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        with pathlib.Path(path).open("rb") as file:
            file.seek(offset)
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file under another name and renames it."""
        _files.write(path, data, permissions=0o644)

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        directories, files = [], []
        try:
            with os.scandir(directory) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        files.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return sorted(directories), sorted(files)

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        pathlib.Path(path).unlink(missing_ok=True)

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if it exists, because making it is the claim."""
        try:
            pathlib.Path(path).mkdir(parents=True)
        except FileExistsError:
            return False
        return True


# Limits of a detail segment. The second one bounds the memory of the writer, which keeps the last segment.
MAX_UPDATES = 8192
MAX_CONTRIBUTIONS = 2**18
MAX_EVENTS = 10_000
MAX_TEXT = 500
# Largest size of an unpacked segment: 8,192 updates of 1,000 workers have 170 MB.
_MAX_BYTES = 2**30
_NAME = re.compile(r"(detail|summary)-(\d{10})\.npz")
# Exceptions of reading a damaged archive.
_DAMAGED = (
    ArithmeticError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclasses.dataclass(frozen=True)
class Detail:
    """Content of a detail segment.

    `first` is the index of its first update in the log, from 0; `replaces` has the serials of the segments whose
    content it has.
    """

    first: int
    updates: Updates
    contributions: Contributions
    events: Events
    replaces: tuple[int, ...] = ()

    @property
    def num_updates(self) -> int:
        """Number of updates."""
        return len(self.updates)

    @staticmethod
    def joined(parts: list[Detail]) -> Detail:
        """Joins consecutive segments."""
        return Detail(
            parts[0].first,
            Updates.concatenated([each.updates for each in parts]),
            Contributions.concatenated([each.contributions for each in parts]),
            Events.concatenated([each.events for each in parts]),
        )

    def summarized(self, workers: int) -> Summary:
        """Returns the segment in groups of 64 steps."""
        starts = summary.buckets(self.updates.step, summary.GROUP_STEPS)
        return Summary(self.first, summary.summarize(self.updates, self.contributions, starts, workers), self.events)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Content of a summary segment.

    `first` is the index of its first update in the log, from 0; `replaces` has the serials of the segments whose
    content it has.
    """

    first: int
    groups: Groups
    events: Events
    replaces: tuple[int, ...] = ()

    @property
    def num_updates(self) -> int:
        """Number of updates."""
        return int(self.groups.updates.sum())

    @staticmethod
    def joined(parts: list[Summary]) -> Summary:
        """Joins consecutive segments, with the newest of their events, in groups of 4,096 steps."""
        groups = Groups.concatenated([each.groups for each in parts])
        events = Events.concatenated([each.events for each in parts])
        starts = summary.buckets(groups.first_step, summary.COARSE_GROUP_STEPS)
        return Summary(parts[0].first, summary.regroup(groups, starts), events[-MAX_EVENTS:])


Segment = Detail | Summary
_C = TypeVar("_C", bound=Columns)


def file_name(kind: str, serial: int) -> str:
    """Returns the name of a segment's file; `kind` is "detail" or "summary"."""
    return f"{kind}-{serial:010d}.npz"


def is_segment(file_name: str) -> bool:
    """Returns True if a file of this name is a segment, and finished."""
    return _NAME.fullmatch(file_name) is not None


def kind_and_serial(file_name: str) -> tuple[str, int]:
    """Returns the inverse of `name`.

    Raises:
      ValueError: the file is no segment.
    """
    match = _NAME.fullmatch(file_name)
    if match is None:
        raise ValueError(f"{file_name!r} is no name of a segment")
    return match[1], int(match[2])


def encode(segment: Segment) -> bytes:
    """Returns a NumPy archive, deflated."""
    parts = (segment.updates, segment.contributions) if isinstance(segment, Detail) else (segment.groups,)
    arrays = {"first": np.asarray(segment.first, np.int64), "replaces": np.asarray(segment.replaces, np.int64)}
    for columns in (*parts, segment.events):
        arrays |= columns.arrays()
    buffer = io.BytesIO()
    # The lowest level packs times nearly as well as the others, in a third of the time.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for column, array in arrays.items():
            with archive.open(f"{column}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()


def decode(kind: str, data: bytes, workers: int) -> Segment:
    """Reads a segment.

    Raises:
      ValueError: it is damaged, or not of this format; the message says why.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(each.file_size for each in archive.infolist())
            if size > _MAX_BYTES:
                raise ValueError(f"it has {size:,} bytes when unpacked, and may have {_MAX_BYTES:,}")
            return (_detail if kind == "detail" else _summary)(archive, workers)
    except _DAMAGED as error:
        raise ValueError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error


def _detail(archive: zipfile.ZipFile, workers: int) -> Detail:
    updates = _columns(archive, Updates)
    contributions = _columns(archive, Contributions)
    if np.any(updates.count < 0) or updates.count.sum(dtype=np.int64) != len(contributions):
        raise ValueError(f"'count' is not the number of contributions, {len(contributions)}")
    if len(contributions) and contributions.worker.max() >= workers:
        raise ValueError(f"it has a worker {contributions.worker.max()}, and log.json has {workers}")
    return Detail(_first(archive), updates, contributions, _columns(archive, Events), _replaces(archive))


def _summary(archive: zipfile.ZipFile, workers: int) -> Summary:
    groups = _columns(archive, Groups)
    shape = len(groups), workers
    wrong = [column for column in Groups.CELLS if getattr(groups, column).shape != shape]
    if wrong:
        raise ValueError(f"column {wrong[0]!r} is not of shape {shape}")
    return Summary(_first(archive), groups, _columns(archive, Events), _replaces(archive))


def _first(archive: zipfile.ZipFile) -> int:
    return int(_array(archive, "first").astype(np.int64))


def _replaces(archive: zipfile.ZipFile) -> tuple[int, ...]:
    return tuple(_array(archive, "replaces").astype(np.int64).ravel().tolist())


def _columns(archive: zipfile.ZipFile, columns: type[_C]) -> _C:
    names, found = {each.removesuffix(".npy") for each in archive.namelist()}, columns.DTYPES.keys()
    arrays = {column: _array(archive, column) for column in found if column in names or column not in columns.OPTIONAL}
    for column, array in arrays.items():
        expected = np.dtype(columns.DTYPES[column])
        if array.dtype.kind != expected.kind or (expected.kind != "U" and array.dtype != expected):
            raise ValueError(f"column {column!r} is of dtype {array.dtype}, not {expected}")
        if not array.ndim or len(array) != len(next(iter(arrays.values()))):
            raise ValueError(f"column {column!r} has another length than the others")
        if expected.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"column {column!r} has a number that is not finite")
    return columns(**arrays) if len(arrays) == len(found) else columns.of(**arrays)


def _array(archive: zipfile.ZipFile, column: str) -> np.ndarray:
    data = archive.read(f"{column}.npy")
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if dtype.hasobject or fortran_order or not dtype.itemsize:
        raise ValueError(f"column {column!r} has Python objects, Fortran's order or empty items")
    # Without a copy, and never more memory than the file has bytes.
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
