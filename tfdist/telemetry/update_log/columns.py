# SPDX-License-Identifier: Apache-2.0
"""The columns of an update log as dataclasses of NumPy arrays, and their sums."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import itertools
import json
import zipfile
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import numpy as np

# Types of the columns.
Int64 = Annotated[np.ndarray, np.int64]
Int32 = Annotated[np.ndarray, np.int32]
UInt16 = Annotated[np.ndarray, np.uint16]
UInt8 = Annotated[np.ndarray, np.uint8]
Float64 = Annotated[np.ndarray, np.float64]
Float32 = Annotated[np.ndarray, np.float32]
Text = Annotated[np.ndarray, np.str_]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Arrays of the same length. The type of each field of a subclass has its dtype."""

    @classmethod
    @functools.cache
    def dtypes(cls) -> dict[str, Any]:
        """Returns the dtypes by the names of the columns."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.dtypes()))))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays by the names of their columns."""
        return {name: getattr(self, name) for name in self.dtypes()}

    def __getitem__(self, rows: slice | np.ndarray) -> Self:
        return type(self)(**{name: array[rows] for name, array in self.arrays().items()})

    def replace(self, **arrays: np.ndarray) -> Self:
        """Returns the columns with some of them replaced."""
        return self.of(**{**self.arrays(), **arrays})

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Builds the columns from arrays or lists, cast to the dtypes of the format."""
        return cls(**{name: np.asarray(values[name], dtype) for name, dtype in cls.dtypes().items()})

    @classmethod
    def of_rows(cls, rows: Sequence[tuple]) -> Self:
        """Builds the columns from tuples with a cell for each column."""
        columns = zip(*rows, strict=True) if rows else [()] * len(cls.dtypes())
        return cls.of(**dict(zip(cls.dtypes(), columns, strict=True)))

    @classmethod
    def concatenated(cls, parts: Sequence[Self]) -> Self:
        """Joins several of them, in order; columns without rows if there are none."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of_rows([])
        return cls(**{name: np.concatenate([getattr(each, name) for each in parts]) for name in cls.dtypes()})


@dataclasses.dataclass(frozen=True)
class Updates(Columns):
    """One row for each update, n of them.

    Attributes:
      step: int64 [n], `optimizer.iterations` after the update, or the count of updates where that is unknown.
      time: float64 [n], seconds at which the update was made.
      opened: float32 [n], duration of the step as Keras sees it.
      wait: float32 [n], seconds of waiting for gradients.
      examples: int32 [n], number of examples in the gradients that entered; 0 if unknown.
      phase: uint8 [n], 0: all replicas train; 1: the warmup phase.
      count: int32 [n], number of contributions of this update.
      reduce: float32 [n], seconds from the last gradient to the end of the all-reduce; 0 if not measured.
    """

    step: Int64
    time: Float64
    opened: Float32
    wait: Float32
    examples: Int32
    phase: UInt8
    count: Int32
    reduce: Float32

    @property
    def offsets(self) -> np.ndarray:
        """Index of the first contribution of each update, and the number of contributions: int64 [n + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.count, dtype=np.int64)])


@dataclasses.dataclass(frozen=True)
class Contributions(Columns):
    """One row for each gradient, m of them, in the order of the updates. Dropped and lost gradients have rows, too.

    Attributes:
      worker: uint16 [m], index into `workers`.
      start: float32 [m], start of its computation in seconds after the `time` of the update: negative.
      arrival: float32 [m], time of its arrival, counted alike; of a lost gradient the time of the loss.
      outcome: uint8 [m], 0: accepted; 1: dropped; 2: lost.
      staleness: uint16 [m], global step - local step, when the gradient was applied or dropped.
      weight: float32 [m], factor with which it entered the update; 0 if it didn't.
      held: float32 [m], seconds for which the worker was held back before this start.
      input: float32 [m], seconds from `start` in which it waited for its batch; 0 if not measured.
    """

    worker: UInt16
    start: Float32
    arrival: Float32
    outcome: UInt8
    staleness: UInt16
    weight: Float32
    held: Float32
    input: Float32


@dataclasses.dataclass(frozen=True)
class Events(Columns):
    """One row for each event, k of them.

    Attributes:
      event_time: float64 [k], seconds, of its begin.
      event_worker: int32 [k], index into `workers`; -1: the policy, or all workers.
      event_kind: uint8 [k], an `EventKind`.
      event_text: str [k], a line for people, of at most 500 characters. Of `FINISHED`: "finished", or "ended by" and
        an exception.
      event_secs: float32 [k], how long it took; 0: a moment.
    """

    event_time: Float64
    event_worker: Int32
    event_kind: UInt8
    event_text: Text
    event_secs: Float32


@dataclasses.dataclass(frozen=True)
class Scalars(Columns):
    """One row for each measurement of a task, or value of the logs, s of them.

    Attributes:
      scalar_time: float64 [s], seconds.
      scalar_step: int64 [s], `optimizer.iterations`.
      scalar_name: str [s], such as "sent_bytes/worker:3", bytes per second, or "loss/train".
      scalar_value: float64 [s].
    """

    scalar_time: Float64
    scalar_step: Int64
    scalar_name: Text
    scalar_value: Float64


@dataclasses.dataclass(frozen=True)
class Groups(Columns):
    """Sums of consecutive updates, in one row (g = 1), or none; columns about gradients have a cell for each worker.

    Attributes:
      begin: float64 [g], opening of its first update.
      end: float64 [g], time of its last update.
      updates: int64 [g], number of updates.
      examples: int64 [g], number of examples.
      wait: float64 [g], sum of the updates' `wait`.
      reduce_secs: float64 [g], sum of the updates' `reduce`.
      accepted, dropped, lost: int32 [g, w], numbers of gradients.
      compute_secs: float32 [g, w], sum of arrival - start.
      compute_max: float32 [g, w], maximum of arrival - start.
      wait_secs: float32 [g, w], sum over accepted gradients of the update's time - its `reduce` - arrival.
      held_secs: float32 [g, w], sum of `held`.
      staleness_sum: int32 [g, w], over the accepted gradients.
      staleness_max: int32 [g, w], over the accepted gradients.
      input_secs: float32 [g, w], sum of `input`.
    """

    begin: Float64
    end: Float64
    updates: Int64
    examples: Int64
    wait: Float64
    reduce_secs: Float64
    accepted: Int32
    dropped: Int32
    lost: Int32
    compute_secs: Float32
    compute_max: Float32
    wait_secs: Float32
    held_secs: Float32
    staleness_sum: Int32
    staleness_max: Int32
    input_secs: Float32


def of_records(records: Sequence[UpdateRecord]) -> tuple[Updates, Contributions]:
    """Returns updates as columns, on the same clock."""
    facts = np.array([(*each[:6], len(each.contributions), each.reduce) for each in records], np.float64)
    updates = Updates.of(**dict(zip(Updates.dtypes(), facts.reshape(-1, 8).T, strict=True)))
    # Fields with a default may be left away.
    rows = [each if len(each) == 8 else (*each, 0.0) for record in records for each in record.contributions]
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.float64, 8 * len(rows))
    given = dict(zip(Contributions.dtypes(), flat.reshape(-1, 8).T, strict=True))
    made = np.repeat(updates.time, updates.count)
    given |= {"start": given["start"] - made, "arrival": given["arrival"] - made}
    given["staleness"] = np.minimum(given["staleness"], np.iinfo(np.uint16).max)
    return updates, Contributions.of(**given)


# A segment of an update log: consecutive updates with all that happened meanwhile, as the bytes of one file.


# A segment that has as many is full, and its file is not written again.
FULL = {"updates": 4096, "contributions": 16_384, "events": 1000, "scalars": 16_384}
SUFFIX = ".npz"
_KINDS = {"updates": Updates, "contributions": Contributions, "events": Events, "scalars": Scalars}


@dataclasses.dataclass(frozen=True)
class Segment:
    """Content of a file. `first` is the index of its first update in the log, from 0."""

    first: int
    updates: Updates
    contributions: Contributions
    events: Events
    scalars: Scalars

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Joins consecutive segments."""
        joined = {name: kind.concatenated([getattr(each, name) for each in parts]) for name, kind in _KINDS.items()}
        return cls(parts[0].first if parts else 0, **joined)  # type: ignore[arg-type]

    def columns(self) -> dict[str, Columns]:
        """Returns the four kinds of rows by their names."""
        return {name: getattr(self, name) for name in FULL}

    @property
    def is_full(self) -> bool:
        """True if it has more of anything than a file is to have."""
        return any(len(rows) >= FULL[name] for name, rows in self.columns().items())

    def cut(self, updates: int) -> tuple[Self, Self]:
        """Returns the first updates, with all events and scalars, and the other updates."""
        gradients = int(self.updates.offsets[updates])
        head = dataclasses.replace(self, updates=self.updates[:updates], contributions=self.contributions[:gradients])
        rest = self.updates[updates:], self.contributions[gradients:], self.events[:0], self.scalars[:0]
        return head, type(self)(self.first + updates, *rest)

    def encoded(self) -> bytes:
        """Returns a NumPy archive, deflated."""
        buffer = io.BytesIO()
        # The lowest level packs times nearly as well as the others, in a third of the time.
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            arrays = {"first": np.asarray(self.first, np.int64)}
            for rows in self.columns().values():
                arrays |= rows.arrays()
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        return buffer.getvalue()

    @classmethod
    def decoded(cls, data: bytes, workers: int) -> Self:
        """Reads the content of a file.

        Raises:
          ValueError: it is damaged, or not of this format; the message says why.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            columns = {name: _checked(kind, arrays) for name, kind in _KINDS.items()}
            found = cls(int(arrays["first"]), **columns)  # type: ignore[arg-type]
        except Exception as error:
            # NumPy and zipfile raise many kinds of exceptions for damaged bytes.
            raise ValueError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        if np.any(found.updates.count < 0) or found.updates.count.sum(dtype=np.int64) != len(found.contributions):
            raise ValueError(f"'count' is not the number of contributions, {len(found.contributions)}")
        if len(found.contributions) and found.contributions.worker.max() >= workers:
            raise ValueError(f"it has a worker {found.contributions.worker.max()}, and log.json has {workers}")
        return found


def _checked(kind: type[Columns], arrays: dict[str, np.ndarray]) -> Columns:
    columns = kind(**{name: arrays[name] for name in kind.dtypes()})
    for name, array in columns.arrays().items():
        expected = np.dtype(kind.dtypes()[name])
        if array.dtype.kind != expected.kind or (expected.kind != "U" and array.dtype != expected):
            raise ValueError(f"column {name!r} is of dtype {array.dtype}, not {expected}")
        if array.ndim != 1 or len(array) != len(columns):
            raise ValueError(f"column {name!r} has another length than the others")
        if expected.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"column {name!r} has a number that is not finite")
    return columns


# Values that a writer of an update log is given: the header, one record for each update, and the kinds of events.


FORMAT = "tfdist update log"
VERSION = 2
MAX_WORKERS = 2**16


class EventKind(enum.IntEnum):
    """Kind of an event."""

    LOST = 0
    RETURNED = 1
    POLICY_CHANGED = 2
    PHASE_CHANGED = 3
    RESUMED = 4
    RESTARTED = 5
    VALIDATION = 6
    CHECKPOINT = 7
    FINISHED = 8


class UpdateRecord(NamedTuple):
    """One update, with the gradients since the previous update. All times are seconds on the clock of the log.

    Attributes:
      step: `optimizer.iterations` after the update, or the number of updates.
      time: time at which the update was made.
      opened: time from the opening of the step to the update.
      wait: time for which the update waited for gradients.
      examples: number of examples in the gradients that entered; 0 if unknown.
      phase: 0: all replicas train; 1: the warmup phase.
      contributions: tuples with the fields of `policies.Contribution`, in that order; the last one may be left away.
      reduce: seconds from the last arrival to the end of the all-reduce; 0 if unknown.
    """

    step: int
    time: float
    opened: float
    wait: float
    examples: int
    phase: int
    contributions: Sequence[tuple[Any, ...]]
    reduce: float = 0.0


@dataclasses.dataclass(frozen=True)
class Header:
    """Content of `log.json`.

    Attributes:
      job: identifier that all logs of one training have in common.
      writer: task that writes the log, such as "chief:0".
      workers: names of the workers; contributions have indices into them.
      strategy: class name of the strategy.
      policies: `repr` of each policy.
      origin_secs: Unix time of second 0 of all times in the log.
      simulated: True if no real cluster made the log.
    """

    job: str
    writer: str
    workers: tuple[str, ...]
    strategy: str = ""
    policies: tuple[str, ...] = ()
    origin_secs: float = 0.0
    simulated: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.workers) <= MAX_WORKERS:
            raise ValueError(
                f"an update log has 1 to {MAX_WORKERS} workers. Received: a Header with {len(self.workers)}"
            )
        if len(set(self.workers)) < len(self.workers):
            raise ValueError(
                "workers of an update log have different names. Received: a Header with the same one twice"
            )

    def to_json(self) -> bytes:
        """Returns the content of `log.json`."""
        values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return (json.dumps(values, indent=1) + "\n").encode()

    @staticmethod
    def from_json(data: bytes) -> Header:
        """Parses the content of `log.json`.

        Raises:
          ValueError: it is no header of an update log, or of another version.
        """
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'log.json has no "format": "{FORMAT}"')
        version = values.get("version")
        if version != VERSION:
            is_newer = isinstance(version, int) and version > VERSION
            remedy = "upgrade tfdist" if is_newer else "use the tfdist that wrote it"
            raise ValueError(f"it is of version {version!r} of the format, not {VERSION}; {remedy} to read it")
        fields = {each.name for each in dataclasses.fields(Header)}
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in fields
        }
        try:
            return Header(**known)
        except TypeError as error:
            raise ValueError(f"log.json lacks a value: {error}") from None
