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
    """One row for each update, n of them.

    Attributes:
      step: int64 [n], `optimizer.iterations` after the update, or the count of updates where that is unknown.
      time: float64 [n], seconds at which the update was made.
      opened: float32 [n], duration of the step as Keras sees it.
      wait: float32 [n], seconds of waiting for gradients.
      examples: int32 [n], number of examples in the gradients that entered; 0 if unknown.
      phase: uint8 [n], 0: all replicas train; 1: the warmup phase.
      count: int32 [n], number of contributions of this update.
      reduce: float32 [n], seconds from the last gradient to the end of the all-reduce; 0 if not measured, and in older
        logs.
    """

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
    """One row for each gradient, m of them, in the order of the updates. Dropped and lost gradients have rows, too.

    Attributes:
      worker: uint16 [m], index into `workers`.
      start: float32 [m], start of its computation in seconds after the `time` of the update: negative.
      arrival: float32 [m], time of its arrival, counted alike; of a lost gradient the time of the loss.
      outcome: uint8 [m], 0: accepted; 1: dropped; 2: lost.
      staleness: uint16 [m], global step - local step, when the gradient was applied or dropped.
      weight: float32 [m], factor with which it entered the update; 0 if it didn't.
      held: float32 [m], seconds for which the worker was held back before this start.
      input: float32 [m], seconds from `start` in which it waited for its batch; 0 if not measured, and in older logs.
    """

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
    """One row for each event, k of them.

    Attributes:
      event_time: float64 [k], seconds, of its begin.
      event_worker: int32 [k], index into `workers`; -1: the policy, or all workers.
      event_kind: uint8 [k], an `EventKind`.
      event_text: str [k], a line for people, of at most 500 characters. Of `FINISHED`: "finished", or "ended by" and
        an exception.
      event_secs: float32 [k], how long it took; 0: a moment. Absent in older logs.
    """

    DTYPES: ClassVar[dict[str, Any]] = {
        "event_time": np.float64,
        "event_worker": np.int32,
        "event_kind": np.uint8,
        "event_text": np.str_,
        "event_secs": np.float32,
    }
    OPTIONAL: ClassVar[tuple[str, ...]] = ("event_secs",)
    event_time: np.ndarray
    event_worker: np.ndarray
    event_kind: np.ndarray
    event_text: np.ndarray
    event_secs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Groups(Columns):
    """One row for each group of consecutive updates, g of them; columns about gradients have a cell for each worker.

    Attributes:
      first_step: int64 [g], step of its first update.
      last_step: int64 [g], step of its last update.
      begin: float64 [g], opening of its first update.
      end: float64 [g], time of its last update.
      updates: int64 [g], number of updates.
      examples: int64 [g], number of examples.
      wait: float64 [g], sum of the updates' `wait`.
      phase: uint8 [g], phase of the last update.
      accepted: int32 [g, w], number of accepted gradients.
      dropped: int32 [g, w], number of dropped gradients.
      lost: int32 [g, w], number of lost gradients.
      compute_secs: float32 [g, w], sum of arrival - start.
      compute_max: float32 [g, w], maximum of arrival - start.
      wait_secs: float32 [g, w], sum over accepted gradients of the update's time - its `reduce` - arrival.
      held_secs: float32 [g, w], sum of `held`.
      staleness_sum: int32 [g, w], over the accepted gradients.
      staleness_max: int32 [g, w], over the accepted gradients.
      input_secs: float32 [g, w], sum of `input`.
      reduce_secs: float64 [g], sum of the updates' `reduce`.
    """

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
