# SPDX-License-Identifier: Apache-2.0
"""Levels of detail of a timeline: sums over workers and buckets of time, at any zoom, in milliseconds.

Sums are added up from single gradients, exactly: for narrow windows when they are asked for, and once from the first
update to the last, between some thousand of them. Wide windows are interpolated from these.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log import Timeline

# Seconds of computation by fate of the gradient, idle seconds, and counts.
CHANNELS: tuple[str, ...] = (
    "accepted_secs",
    "dropped_secs",
    "lost_secs",
    "wait_secs",
    "held_secs",
    "accepted",
    "dropped",
    "lost",
    "staleness_sum",
    "input_secs",
    "reduce_secs",
)
UPDATE_CHANNELS = ("updates", "examples", "update_wait_secs")
# Windows with more gradients are interpolated.
MAX_ROWS = 250_000
_MAX_PARTS = 8192
_MAX_CELLS = 4_000_000


class Buckets(NamedTuple):
    """Sums of a window.

    Attributes:
      cells: float32 [len(CHANNELS), buckets, workers].
      totals: float32 [len(UPDATE_CHANNELS), buckets].
      is_exact: False if they were interpolated.
    """

    cells: np.ndarray
    totals: np.ndarray
    is_exact: bool


class Levels:
    """Sums of a timeline over any window of time."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._workers = len(timeline.workers)
        self._offsets = timeline.updates.offsets
        # Updates may be out of order by the clocks of hosts; a search needs an order.
        self._times = np.maximum.accumulate(timeline.updates.time)
        self._longest = self._longest_life()
        most = max(64, min(_MAX_PARTS, _MAX_CELLS // self._workers))
        every = -(-len(self._times) // most) or 1
        begin = timeline.span[0]
        self._edges = np.unique([begin, *self._times[::-every], begin + 1e-9])
        # Sums up to each of the edges.
        found = self._exact(self._edges)
        self._cells, self._totals = (np.cumsum(np.insert(each, 0, 0.0, axis=1), axis=1) for each in found)

    @property
    def sums(self) -> np.ndarray:
        """Sums of the whole timeline: [len(CHANNELS), workers]."""
        return self._cells[:, -1]

    def window(self, begin: float, end: float, buckets: int) -> Buckets:
        """Adds up `buckets` equal parts of a window."""
        is_exact = self.is_detailed(begin, end, MAX_ROWS)
        edges = np.linspace(begin, end, buckets + 1)
        cells, totals = (
            self._exact(edges)
            if is_exact
            else (_differences(self._edges, each, edges) for each in (self._cells, self._totals))
        )
        return Buckets(cells.astype(np.float32), totals.astype(np.float32), is_exact)

    def rows(self, begin: float, end: float) -> tuple[int, int]:
        """Returns the range of the updates with a gradient that was alive between two times."""
        first = np.searchsorted(self._times, begin, "left")
        last = np.searchsorted(self._times, end + self._longest, "right")
        return int(first), int(last)

    def is_detailed(self, begin: float, end: float, most: int) -> bool:
        """Returns True if the window has at most so many gradients."""
        first, last = self.rows(begin, end)
        return bool(self._offsets[last] - self._offsets[first] <= most)

    def _longest_life(self) -> float:
        """Returns how long before its update a gradient or a hold begins, at most; rare longer ones are cut."""
        rows = self._timeline.contributions
        if not len(rows):
            return 0.0
        stride = -(-len(rows) // 1_000_003)
        born = rows.held[::stride] - rows.start[::stride]
        step = float(np.median(self._timeline.updates.opened))
        return float(min(born.max(), max(50 * step, np.median(born[:: max(1, len(born) // 10_000)]) * 4)))

    def _exact(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds up single gradients between edges: [channels, buckets, workers] and [channels, buckets]."""
        # Earlier gradients, too: until when their workers waited.
        first, last = self.rows(edges[0] - self._longest, edges[-1])
        updates = self._timeline.updates[first:last]
        rows = self._timeline.contributions[self._offsets[first] : self._offsets[last]]
        made = np.repeat(updates.time, updates.count)
        start, arrival = made + rows.start, made + rows.arrival
        is_accepted = rows.outcome == Outcome.ACCEPTED
        waits_until = np.where(is_accepted, made, arrival)
        read = np.minimum(start + rows.input, arrival)
        summing = np.maximum(made - np.repeat(updates.reduce, updates.count), arrival)
        held_since = np.maximum(start - rows.held, _idle_since(rows.worker, start, waits_until))
        grid = _Grid(edges, self._workers)
        cells = np.zeros((len(CHANNELS), len(edges) - 1, self._workers))
        channel = dict(zip(CHANNELS, cells, strict=True))
        for outcome in Outcome:
            chosen, name = rows.outcome == outcome, outcome.name.lower()
            channel[f"{name}_secs"] += grid.spread(rows.worker[chosen], read[chosen], arrival[chosen])
            channel[name] += grid.count(rows.worker[chosen], arrival[chosen])
        channel["wait_secs"] += grid.spread(rows.worker, arrival, np.minimum(summing, waits_until))
        channel["held_secs"] += grid.spread(rows.worker, held_since, start)
        channel["input_secs"] += grid.spread(rows.worker, start, read)
        accepted = rows.worker[is_accepted]
        channel["reduce_secs"] += grid.spread(accepted, summing[is_accepted], made[is_accepted])
        channel["staleness_sum"] += grid.count(accepted, arrival[is_accepted], rows.staleness[is_accepted])
        one, zero = _Grid(edges, 1), np.zeros(len(updates), np.int64)
        weights = np.ones(len(updates)), updates.examples, updates.wait
        return cells, np.stack([one.count(zero, updates.time, each)[:, 0] for each in weights])


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Buckets of time, between increasing edges, for each worker."""

    edges: np.ndarray
    workers: int

    def count(self, worker: np.ndarray, time: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Adds up what happened in each bucket: [buckets, workers]."""
        bucket = np.searchsorted(self.edges, time, "right") - 1
        # The last bucket has its end, so that the last update is in the window of the whole timeline.
        bucket[time == self.edges[-1]] -= 1
        inside = (bucket >= 0) & (bucket < len(self.edges) - 1)
        cell = bucket[inside] * self.workers + worker[inside]
        return self._sum(cell, None if weights is None else weights[inside])

    def spread(self, worker: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Adds up the seconds that intervals have in each bucket: [buckets, workers]."""
        # Bucket, and part of it that is over.
        places = np.arange(len(self.edges), dtype=np.float64)
        low, high = np.interp(begin, self.edges, places), np.interp(end, self.edges, places)
        some = high > low
        low, high, worker = low[some], high[some], worker[some].astype(np.int64)
        first = low.astype(np.int64)
        last = np.minimum(high.astype(np.int64), len(self.edges) - 2)
        head = self._sum(first * self.workers + worker, np.minimum(high, first + 1) - low)
        beyond = last > first
        last, first, worker = last[beyond], first[beyond], worker[beyond]
        tail = self._sum(last * self.workers + worker, high[beyond] - last)
        # Whole buckets in between.
        whole = self._sum((first + 1) * self.workers + worker) - self._sum(last * self.workers + worker)
        return (head + tail + np.cumsum(whole, axis=0)) * np.diff(self.edges)[:, None]

    def _sum(self, cell: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        shape = len(self.edges) - 1, self.workers
        return np.bincount(cell, weights, shape[0] * shape[1]).reshape(shape).astype(np.float64)


def _idle_since(worker: np.ndarray, start: np.ndarray, waits_until: np.ndarray) -> np.ndarray:
    """Returns until when the worker of each gradient waited for the update of its previous gradient."""
    order = np.lexsort((start, worker))
    since = np.full(len(worker), -np.inf)
    same = worker[order[1:]] == worker[order[:-1]]
    since[order[1:][same]] = waits_until[order[:-1][same]]
    return since


def _differences(limits: np.ndarray, sums: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Interpolates sums up to each of `limits` at `edges`, and returns the differences."""
    place = np.interp(edges, limits, np.arange(len(limits), dtype=np.float64))
    index = np.minimum(place.astype(np.int64), len(limits) - 2)
    part = (place - index).reshape((-1,) + (1,) * (sums.ndim - 2))
    return np.diff(sums[:, index] * (1 - part) + sums[:, index + 1] * part, axis=1)
