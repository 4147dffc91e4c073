# SPDX-License-Identifier: Apache-2.0
"""Levels of detail of a timeline: sums over workers and buckets of time, at any zoom, in milliseconds.

Narrow windows are added up from single gradients, exactly. Wide windows come from prefix sums over groups of
consecutive updates. They are interpolated at the limits of the buckets, where a group's seconds are spread evenly.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log import Groups, Timeline
from tfdist.telemetry.update_log.summary import summarize

# Seconds of computation by fate of the gradient, idle seconds, and counts.
CHANNELS = (
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
# Windows with more gradients are read from the groups.
MAX_ROWS = 250_000
_MAX_GROUPS = 8192
_MAX_CELLS = 4_000_000


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sums of a window.

    Attributes:
      begin: time of the first bucket's begin.
      secs: length of a bucket.
      cells: float32 [len(CHANNELS), buckets, workers].
      totals: float32 [len(UPDATE_CHANNELS), buckets].
      is_exact: False if a group's seconds were spread evenly over its time.
    """

    begin: float
    secs: float
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
        groups, dropped, lost = self._base()
        # One group of all updates.
        self.total = timeline.total()
        self._edges, self._cells, self._totals = _prefix_sums(groups, dropped, lost)

    @property
    def sums(self) -> np.ndarray:
        """Sums of the whole timeline: [len(CHANNELS), workers]."""
        return self._cells[:, -1]

    def window(self, begin: float, end: float, buckets: int) -> Buckets:
        """Adds up `buckets` equal parts of a window."""
        is_exact = self.is_detailed(begin, end, MAX_ROWS)
        if is_exact:
            cells, totals = self._exact(begin, end, buckets)
        else:
            edges = np.linspace(begin, end, buckets + 1)
            cells = _differences(self._edges, self._cells, edges)
            totals = _differences(self._edges, self._totals, edges)
        secs = (end - begin) / buckets
        return Buckets(begin, secs, cells.astype(np.float32), totals.astype(np.float32), is_exact)

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

    def _base(self) -> tuple[Groups, np.ndarray, np.ndarray]:
        """Returns groups of all updates, with the seconds of dropped and of lost gradients, [g, w]."""
        timeline, workers = self._timeline, self._workers
        most = max(64, min(_MAX_GROUPS, _MAX_CELLS // workers))
        size = -(-len(timeline.updates) // most) or 1
        starts = np.arange(0, len(timeline.updates), size)
        groups = summarize(timeline.updates, timeline.contributions, starts, workers)
        dropped, lost = (_secs_of(timeline, each, starts, workers) for each in (Outcome.DROPPED, Outcome.LOST))
        return groups, dropped, lost

    def _exact(self, begin: float, end: float, buckets: int) -> tuple[np.ndarray, np.ndarray]:
        timeline, workers = self._timeline, self._workers
        # Earlier gradients, too: until when their workers waited.
        first, last = self.rows(begin - self._longest, end)
        updates = timeline.updates[first:last]
        rows = timeline.contributions[self._offsets[first] : self._offsets[last]]
        made = np.repeat(updates.time, updates.count)
        start, arrival = made + rows.start, made + rows.arrival
        grid = _Grid(begin, (end - begin) / buckets, buckets, workers)
        is_accepted = rows.outcome == Outcome.ACCEPTED
        waits_until = np.where(is_accepted, made, arrival)
        read = np.minimum(start + rows.input, arrival)
        summing = np.maximum(made - np.repeat(updates.reduce, updates.count), arrival)
        held = start - np.maximum(
            0, start - np.maximum(start - rows.held, _idle_since(rows.worker, start, waits_until))
        )
        cells = np.zeros((len(CHANNELS), buckets, workers))
        for outcome in Outcome:
            chosen = rows.outcome == outcome
            cells[outcome] = grid.spread(rows.worker[chosen], read[chosen], arrival[chosen])
            cells[5 + outcome] = grid.count(rows.worker[chosen], arrival[chosen])
        cells[3] = grid.spread(rows.worker, arrival, np.minimum(summing, waits_until))
        cells[4] = grid.spread(rows.worker, held, start)
        cells[9] = grid.spread(rows.worker, start, read)
        cells[10] = grid.spread(rows.worker[is_accepted], summing[is_accepted], made[is_accepted])
        cells[8] = grid.count(rows.worker[is_accepted], arrival[is_accepted], rows.staleness[is_accepted])
        one = _Grid(begin, (end - begin) / buckets, buckets, 1)
        zero = np.zeros(len(updates), np.int64)
        weights = (np.ones(len(updates)), updates.examples, updates.wait)
        return cells, np.stack([one.count(zero, updates.time, each)[:, 0] for each in weights])


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Equal buckets of time for each worker."""

    begin: float
    secs: float
    buckets: int
    workers: int

    def count(self, worker: np.ndarray, time: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Adds up what happened in each bucket: [buckets, workers]."""
        bucket = np.floor((time - self.begin) / self.secs).astype(np.int64)
        # The last bucket has its end, so that the last update is in the window of the whole timeline.
        bucket[time == self.begin + self.buckets * self.secs] = self.buckets - 1
        inside = (bucket >= 0) & (bucket < self.buckets)
        cell = bucket[inside] * self.workers + worker[inside]
        return self._sum(cell, None if weights is None else weights[inside])

    def spread(self, worker: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Adds up the seconds that intervals have in each bucket: [buckets, workers]."""
        low = np.clip((begin - self.begin) / self.secs, 0, self.buckets)
        high = np.clip((end - self.begin) / self.secs, 0, self.buckets)
        some = high > low
        low, high, worker = low[some], high[some], worker[some].astype(np.int64)
        first = low.astype(np.int64)
        last = np.minimum(high.astype(np.int64), self.buckets - 1)
        head = self._sum(first * self.workers + worker, np.minimum(high, first + 1) - low)
        beyond = last > first
        last, first, worker = last[beyond], first[beyond], worker[beyond]
        tail = self._sum(last * self.workers + worker, high[beyond] - last)
        # Whole buckets in between.
        whole = self._sum((first + 1) * self.workers + worker) - self._sum(last * self.workers + worker)
        return (head + tail + np.cumsum(whole, axis=0)) * self.secs

    def _sum(self, cell: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        shape = self.buckets, self.workers
        return np.bincount(cell, weights, shape[0] * shape[1]).reshape(shape).astype(np.float64)


def _idle_since(worker: np.ndarray, start: np.ndarray, waits_until: np.ndarray) -> np.ndarray:
    """Returns until when the worker of each gradient waited for the update of its previous gradient."""
    order = np.lexsort((start, worker))
    since = np.full(len(worker), -np.inf)
    same = worker[order[1:]] == worker[order[:-1]]
    since[order[1:][same]] = waits_until[order[:-1][same]]
    return since


def _secs_of(timeline: Timeline, outcome: Outcome, starts: np.ndarray, workers: int) -> np.ndarray:
    chosen = np.flatnonzero(timeline.contributions.outcome == outcome)
    shape = len(starts), workers
    rows = timeline.contributions[chosen]
    update = np.searchsorted(timeline.updates.offsets, chosen, "right") - 1
    group = np.searchsorted(starts, update, "right") - 1
    return np.bincount(group * workers + rows.worker, rows.arrival - rows.start, shape[0] * workers).reshape(shape)


def _prefix_sums(groups: Groups, dropped: np.ndarray, lost: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the limits of the groups, and sums up to each: [channels, limits, workers] and [channels, limits]."""
    if not len(groups):
        return np.zeros(1), np.zeros((len(CHANNELS), 1, groups.accepted.shape[1])), np.zeros((len(UPDATE_CHANNELS), 1))
    edges = np.maximum.accumulate(np.append(groups.begin[:1], groups.end))
    cells = (
        np.maximum(0, groups.compute_secs - dropped - lost - groups.input_secs),
        dropped,
        lost,
        groups.wait_secs,
        # A worker that waits for the update of its gradient is held back as well; it counts once.
        np.maximum(0, groups.held_secs - groups.wait_secs),
        groups.accepted,
        groups.dropped,
        groups.lost,
        groups.staleness_sum,
        groups.input_secs,
        groups.accepted * (groups.reduce_secs / np.maximum(1, groups.updates))[:, None],
    )
    sums = np.zeros((len(CHANNELS), len(edges), groups.accepted.shape[1]))
    for channel, values in enumerate(cells):
        np.cumsum(values, axis=0, out=sums[channel, 1:])
    totals = np.zeros((len(UPDATE_CHANNELS), len(edges)))
    for channel, values in enumerate((groups.updates, groups.examples, groups.wait)):
        np.cumsum(values, out=totals[channel, 1:])
    return edges, sums, totals


def _differences(limits: np.ndarray, sums: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Interpolates prefix sums at `edges` and returns their differences."""
    index = np.clip(np.searchsorted(limits, edges, "right") - 1, 0, max(0, len(limits) - 2))
    after = np.minimum(index + 1, len(limits) - 1)
    length = limits[after] - limits[index]
    part = np.clip((edges - limits[index]) / np.where(length > 0, length, 1), 0, 1)
    part = part.reshape((-1,) + (1,) * (sums.ndim - 2))
    at_edges = sums[:, index] * (1 - part) + sums[:, after] * part
    return np.diff(at_edges, axis=1)
