# SPDX-License-Identifier: Apache-2.0
"""The columns of an update log as dataclasses of NumPy arrays: updates, contributions, events and groups of updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Columns:
    """Arrays of the same length. A subclass has one field for each column, and its dtype in `DTYPES`."""

    DTYPES: ClassVar[dict[str, Any]] = {}
    # Columns of shape [rows, workers]; the others have one cell in each row.
    CELLS: ClassVar[tuple[str, ...]] = ()
    # Columns that older logs don't have; they are zero there.
    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return len(self.arrays()[next(iter(self.DTYPES))])

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays by the names of their columns."""
        return {name: getattr(self, name) for name in self.DTYPES}

    def __getitem__(self, rows: slice | np.ndarray) -> Self:
        return type(self)(**{name: array[rows] for name, array in self.arrays().items()})

    def replace(self, **arrays: np.ndarray) -> Self:
        """Returns the columns with some of them replaced."""
        return self.of(**{**self.arrays(), **arrays})

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Builds the columns from arrays or lists, cast to the dtypes of the format; absent optional ones are zero."""
        for name in cls.OPTIONAL:
            values.setdefault(name, np.zeros_like(values[cls._like(name)], cls.DTYPES[name]))
        return cls(**{name: np.asarray(values[name], dtype) for name, dtype in cls.DTYPES.items()})

    @classmethod
    def _like(cls, name: str) -> str:
        """Returns a column of the same shape that every log has."""
        return cls.CELLS[0] if name in cls.CELLS else next(iter(cls.DTYPES))

    @classmethod
    def concatenated(cls, parts: Sequence[Self], workers: int = 0) -> Self:
        """Joins several of them, in order; `empty(workers)` if there are none."""
        if not parts:
            return cls.empty(workers)
        if len(parts) == 1:
            return parts[0]
        return cls(**{name: np.concatenate([getattr(each, name) for each in parts]) for name in cls.DTYPES})

    @classmethod
    def empty(cls, workers: int = 0) -> Self:
        """Returns columns without rows, for so many workers."""
        shapes = {name: (0, workers) if name in cls.CELLS else (0,) for name in cls.DTYPES}
        return cls(**{name: np.zeros(shapes[name], dtype) for name, dtype in cls.DTYPES.items()})


@dataclasses.dataclass(frozen=True)
class Updates(Columns):
    """One row for each update; docs/update_log.md has the meaning of each column."""

    DTYPES: ClassVar[dict[str, Any]] = {
        "step": np.int64,
        "time": np.float64,
        "opened": np.float32,
        "wait": np.float32,
        "examples": np.int32,
        "phase": np.uint8,
        "count": np.int32,
        "reduce": np.float32,
    }
    OPTIONAL: ClassVar[tuple[str, ...]] = ("reduce",)
    step: np.ndarray
    time: np.ndarray
    opened: np.ndarray
    wait: np.ndarray
    examples: np.ndarray
    phase: np.ndarray
    count: np.ndarray
    reduce: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        """Index of the first contribution of each update, and the number of contributions: int64 [n + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.count, dtype=np.int64)])


@dataclasses.dataclass(frozen=True)
class Contributions(Columns):
    """One row for each gradient, in the order of the updates; times are seconds after the time of its update."""

    DTYPES: ClassVar[dict[str, Any]] = {
        "worker": np.uint16,
        "start": np.float32,
        "arrival": np.float32,
        "outcome": np.uint8,
        "staleness": np.uint16,
        "weight": np.float32,
        "held": np.float32,
        "input": np.float32,
    }
    OPTIONAL: ClassVar[tuple[str, ...]] = ("input",)
    worker: np.ndarray
    start: np.ndarray
    arrival: np.ndarray
    outcome: np.ndarray
    staleness: np.ndarray
    weight: np.ndarray
    held: np.ndarray
    input: np.ndarray


@dataclasses.dataclass(frozen=True)
class Events(Columns):
    """One row for each event."""

    DTYPES: ClassVar[dict[str, Any]] = {
        "event_time": np.float64,
        "event_worker": np.int32,
        "event_kind": np.uint8,
        "event_text": np.str_,
    }
    event_time: np.ndarray
    event_worker: np.ndarray
    event_kind: np.ndarray
    event_text: np.ndarray


@dataclasses.dataclass(frozen=True)
class Groups(Columns):
    """One row for each group of consecutive updates; columns about gradients have a cell for each worker, [g, w]."""

    DTYPES: ClassVar[dict[str, Any]] = {
        "first_step": np.int64,
        "last_step": np.int64,
        "begin": np.float64,
        "end": np.float64,
        "updates": np.int64,
        "examples": np.int64,
        "wait": np.float64,
        "phase": np.uint8,
        "accepted": np.int32,
        "dropped": np.int32,
        "lost": np.int32,
        "compute_secs": np.float32,
        "compute_max": np.float32,
        "wait_secs": np.float32,
        "held_secs": np.float32,
        "staleness_sum": np.int32,
        "staleness_max": np.int32,
        "input_secs": np.float32,
        "reduce_secs": np.float64,
    }
    CELLS: ClassVar[tuple[str, ...]] = (
        "accepted",
        "dropped",
        "lost",
        "compute_secs",
        "compute_max",
        "wait_secs",
        "held_secs",
        "staleness_sum",
        "staleness_max",
        "input_secs",
    )
    OPTIONAL: ClassVar[tuple[str, ...]] = ("input_secs", "reduce_secs")
    first_step: np.ndarray
    last_step: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    updates: np.ndarray
    examples: np.ndarray
    wait: np.ndarray
    phase: np.ndarray
    accepted: np.ndarray
    dropped: np.ndarray
    lost: np.ndarray
    compute_secs: np.ndarray
    compute_max: np.ndarray
    wait_secs: np.ndarray
    held_secs: np.ndarray
    staleness_sum: np.ndarray
    staleness_max: np.ndarray
    input_secs: np.ndarray
    reduce_secs: np.ndarray
