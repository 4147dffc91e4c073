# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job at one moment: the whole cluster, and one row for each worker. Pure functions of a `Timeline`."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tfdist.telemetry import report
from tfdist.telemetry.update_log import Contributions, EventKind, Outcome, Timeline, Updates

# Intervals of each worker in time: held back, input, computing, waiting, all-reduce. They never overlap in a lane.


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One row for each gradient, sorted by worker and arrival. All times are seconds on the timeline's clock.

    The parts of a step are held back [held, start], input [start, read], computing [read, arrival], waiting for the
    others [arrival, summing], and all-reduce [summing, end]. A worker that computes its next gradient before the update
    is made doesn't wait. Where a worker has several gradients under way at once, a later one begins when the earlier
    one has arrived.

    Attributes:
      row: index of the contribution.
      update: index of its update.
      worker: index of the worker.
      held, start, read, arrival, summing, end: limits of the intervals, float64, increasing within a worker.
    """

    row: np.ndarray
    update: np.ndarray
    worker: np.ndarray
    held: np.ndarray
    start: np.ndarray
    read: np.ndarray
    arrival: np.ndarray
    summing: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @staticmethod
    def of(updates: Updates, contributions: Contributions) -> Lanes:
        """Computes the lanes of consecutive updates with their contributions."""
        update = np.repeat(np.arange(len(updates)), updates.count)
        made = updates.time[update]
        arrival = made + np.minimum(contributions.arrival.astype(np.float64), 0.0)
        row = np.lexsort((arrival, contributions.worker))
        worker, arrival, made, update = contributions.worker[row], arrival[row], made[row], update[row]
        is_first = np.concatenate([[True], worker[1:] != worker[:-1]])[: len(row)]
        before = np.where(is_first, -np.inf, np.roll(arrival, 1))
        start = made + contributions.start[row].astype(np.float64)
        start = np.minimum(np.maximum(start, before), arrival)
        held = np.maximum(start - contributions.held[row].astype(np.float64), before)
        after = np.where(np.roll(is_first, -1), np.inf, np.roll(held, -1))
        is_accepted = contributions.outcome[row] == Outcome.ACCEPTED
        end = np.where(is_accepted, np.maximum(np.minimum(made, after), arrival), arrival)
        read = np.minimum(start + contributions.input[row], arrival)
        summing = np.where(is_accepted, np.maximum(end - updates.reduce[update], arrival), end)
        return Lanes(row, update, worker.astype(np.int64), held, start, read, arrival, summing, end)

    @property
    def limits(self) -> tuple[np.ndarray, ...]:
        """All limits, in order."""
        return self.held, self.start, self.read, self.arrival, self.summing, self.end


# A worker whose next gradient takes longer than this multiple of its 95th percentile is shown with the time.
_LATE_FACTOR = 3.0
_LATE_SECS = 1.0
_MAX_GRADIENTS = 500_000
# Not listed: they are as many as epochs.
_UNLISTED = (EventKind.VALIDATION, EventKind.CHECKPOINT, EventKind.FINISHED)
_MOMENTS = ("held", "input", "computing", "waiting", "all-reduce")


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """One worker. Counts are those of the whole job; all else is measured in the window.

    Attributes:
      name: name of the worker, such as "worker:3".
      state: "input", "computing", "waiting", "all-reduce", "held", "lost", "ended" with the training, or "absent"
        before its first gradient.
      late_secs: time since its last gradient, if that is unusually long; else 0.
      accepted, dropped, lost: gradients.
      p50_secs, p95_secs: percentiles of the time from start to arrival of a gradient; nan without any.
      input_secs: median of its waits for a batch; nan where that isn't measured.
      staleness_mean, staleness_max: of the accepted gradients; nan and 0 without any.
      input, compute, wait, reduce, held: shares of the window.
      cost: what the worker took from the cluster, in workers: `Report.cost_secs` over the window.
      is_slow: True if it is slower than all others: `Report.slow`.
    """

    name: str
    state: str
    late_secs: float
    accepted: int
    dropped: int
    lost: int
    p50_secs: float
    p95_secs: float
    input_secs: float
    staleness_mean: float
    staleness_max: int
    input: float
    compute: float
    wait: float
    reduce: float
    held: float
    cost: float
    is_slow: bool = False


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A job at one moment.

    Attributes:
      strategy, policies: as in the log's header.
      is_simulated: True if no real cluster made the log.
      is_warmup: True in the warmup phase.
      step: `optimizer.iterations` after the last update.
      updates: number of updates.
      begin, last: Unix times of the opening of the first update, and of the last update.
      ended: how the training has ended, such as "finished"; "" while it runs.
      window_secs: length of the window that the rates are measured in.
      updates_per_sec, examples_per_sec: rates; examples are nan if they are unknown.
      wait: share of the window in which the updates waited for gradients.
      in_words: a line about who is slow; see `Report.in_words`.
      workers: rows; lost workers first, then in the order of `Report.order`.
      events: Unix time, name of the worker ("" for all), kind and text of each event, the last first.
    """

    strategy: str
    policies: tuple[str, ...]
    is_simulated: bool
    is_warmup: bool
    step: int
    updates: int
    begin: float
    last: float
    ended: str
    window_secs: float
    updates_per_sec: float
    examples_per_sec: float
    wait: float
    in_words: str
    workers: tuple[WorkerRow, ...]
    events: tuple[tuple[float, str, EventKind, str], ...]


def take(timeline: Timeline, window_secs: float = 60.0, max_events: int = 20) -> Snapshot:
    """Computes the numbers of the last `window_secs` before a job's last update."""
    updates, contributions = _window(timeline, window_secs)
    begin, end = _limits(updates)
    secs = end - begin
    found = report.of_log(updates, contributions, timeline.workers)
    examples = int(updates.examples.sum())
    header, (first, last) = timeline.header, timeline.span
    return Snapshot(
        strategy=header.strategy,
        policies=header.policies,
        is_simulated=header.simulated,
        is_warmup=bool(_last(updates.phase, timeline.groups.phase, 0)),
        step=int(_last(updates.step, timeline.groups.last_step, 0)),
        updates=timeline.num_updates,
        begin=timeline.origin_secs + first,
        last=timeline.origin_secs + last,
        ended=timeline.ended,
        window_secs=secs,
        updates_per_sec=len(updates) / secs if secs else np.nan,
        examples_per_sec=examples / secs if secs and examples else np.nan,
        wait=min(1.0, float(updates.wait.sum()) / secs) if secs else np.nan,
        in_words=found.in_words,
        workers=_rows(timeline, updates, contributions, found),
        events=_events(timeline, max_events),
    )


def _window(timeline: Timeline, secs: float) -> tuple[Updates, Contributions]:
    updates, time = timeline.updates, timeline.updates.time
    if not len(updates):
        return updates, timeline.contributions
    first = min(int(np.searchsorted(np.maximum.accumulate(time), time[-1] - secs)), len(updates) - 1)
    # A window of many gradients is shortened, so that a refresh takes no longer than a second or two.
    newest = timeline.contributions[int(updates.offsets[first]) :]
    return report.newest(updates[first:], newest, _MAX_GRADIENTS)


def _limits(updates: Updates) -> tuple[float, float]:
    if not len(updates):
        return 0.0, 0.0
    return float(updates.time[0] - updates.opened[0]), float(updates.time.max())


def _last(columns: np.ndarray, older: np.ndarray, default: float) -> float:
    return next((each[-1] for each in (columns, older) if len(each)), default)


def _rows(
    timeline: Timeline, updates: Updates, contributions: Contributions, found: report.Report
) -> tuple[WorkerRow, ...]:
    count = len(timeline.workers)
    begin, end = _limits(updates)
    lanes = Lanes.of(updates, contributions)
    shares = _shares(lanes, count, begin, end)
    mean, largest = _staleness(contributions, count)
    accepted, dropped, lost = _totals(timeline)
    p95 = np.array([_secs(found.step_secs.get(name), "p95") for name in timeline.workers])
    states, late = _states(timeline, updates, contributions, lanes, p95, accepted + dropped + lost > 0)
    slow = found.slow.names if found.slow else ()
    rows = {
        name: WorkerRow(
            name,
            states[i],
            float(late[i]),
            int(accepted[i]),
            int(dropped[i]),
            int(lost[i]),
            _secs(found.step_secs.get(name), "p50"),
            float(p95[i]),
            _secs(found.input_secs.get(name), "p50"),
            float(mean[i]),
            int(largest[i]),
            *(float(each[i]) for each in shares),
            cost=found.cost_secs[name] / max(end - begin, 1e-9),
            is_slow=name in slow,
        )
        for i, name in enumerate(timeline.workers)
    }
    return tuple(sorted((rows[name] for name in found.order), key=lambda row: row.state != "lost"))


def _secs(found: report.Percentiles | None, name: str) -> float:
    return getattr(found, name) if found is not None and found.count else math.nan


def _shares(lanes: Lanes, count: int, begin: float, end: float) -> list[np.ndarray]:
    """Returns the shares of [begin, end] in which each worker read, computed, waited, reduced and was held."""
    limits = [np.clip(each, begin, end) for each in lanes.limits]
    held, *others = (np.bincount(lanes.worker, b - a, count) for a, b in itertools.pairwise(limits))
    return [each / max(end - begin, 1e-9) for each in (*others, held)]


def _staleness(contributions: Contributions, count: int) -> tuple[np.ndarray, np.ndarray]:
    is_accepted = contributions.outcome == Outcome.ACCEPTED
    worker, staleness = contributions.worker[is_accepted], contributions.staleness[is_accepted]
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, worker, staleness)
    sizes = np.bincount(worker, minlength=count)
    with np.errstate(invalid="ignore"):
        return np.bincount(worker, staleness, count) / np.where(sizes, sizes, np.nan), largest


def _totals(timeline: Timeline) -> list[np.ndarray]:
    """Returns the accepted, dropped and lost gradients of each worker in the whole job."""
    groups, contributions, count = timeline.groups, timeline.contributions, len(timeline.workers)
    outcome = np.minimum(contributions.outcome, Outcome.LOST).astype(np.int64)
    cells = np.bincount(outcome * count + contributions.worker, minlength=3 * count).reshape(3, count)
    older = (groups.accepted, groups.dropped, groups.lost)
    return [each.sum(axis=0) + row for each, row in zip(older, cells, strict=True)]


def _states(
    timeline: Timeline,
    updates: Updates,
    contributions: Contributions,
    lanes: Lanes,
    p95: np.ndarray,
    is_known: np.ndarray,
) -> tuple[list[str], np.ndarray]:
    """Returns the state of each worker, and the time since its last gradient where that is unusually long.

    The log knows of a gradient once it has arrived. So the state is that of half a gradient before the last update.
    """
    count = len(timeline.workers)
    states, late = ["computing" if known else "absent" for known in is_known], np.zeros(count)
    if len(updates):
        secs = contributions.arrival - contributions.start
        typical = max(float(updates.opened[-1]), float(np.median(secs)) if len(secs) else 0.0)
        moment = float(updates.time[-1]) - typical / 2
        limits = np.stack(lanes.limits)
        for number, state in enumerate(_MOMENTS):
            for index in lanes.worker[(limits[number] <= moment) & (moment < limits[number + 1])]:
                states[index] = state
        since = _since(lanes, updates, count)
        is_late = (since > np.maximum(_LATE_FACTOR * np.nan_to_num(p95), _LATE_SECS)) & is_known
        late = np.where(is_late, since, 0.0)
        for index in np.flatnonzero(is_late):
            states[index] = "computing"
    if timeline.ended:
        states, late = ["ended" if known else "absent" for known in is_known], np.zeros(count)
    for index in _lost(timeline, contributions, lanes):
        states[index], late[index] = "lost", 0.0
    return states, late


def _since(lanes: Lanes, updates: Updates, count: int) -> np.ndarray:
    """Returns the time from each worker's last gradient in the window, or from the window's begin, to its end."""
    begin, end = _limits(updates)
    arrived = np.full(count, begin)
    np.maximum.at(arrived, lanes.worker, lanes.arrival)
    return end - arrived


def _lost(timeline: Timeline, contributions: Contributions, lanes: Lanes) -> set[int]:
    """Returns the workers that were lost and haven't come back: neither an event nor a gradient says so."""
    count = len(timeline.workers)
    lost, back = np.full(count, -np.inf), np.full(count, -np.inf)
    is_lost = contributions.outcome[lanes.row] == Outcome.LOST
    np.maximum.at(lost, lanes.worker[is_lost], lanes.arrival[is_lost])
    np.maximum.at(back, lanes.worker[~is_lost], lanes.start[~is_lost])
    events = timeline.events
    has_worker = (events.event_worker >= 0) & (events.event_worker < count)
    for kind, times in ((EventKind.LOST, lost), (EventKind.RETURNED, back)):
        noted = has_worker & (events.event_kind == kind)
        np.maximum.at(times, events.event_worker[noted], events.event_time[noted])
    return set(np.flatnonzero(lost > back).tolist())


def _events(timeline: Timeline, most: int) -> tuple[tuple[float, str, EventKind, str], ...]:
    listed = timeline.events[~np.isin(timeline.events.event_kind, _UNLISTED)]
    rows = listed[-most:] if most else listed[:0]
    names = [timeline.workers[each] if 0 <= each < len(timeline.workers) else "" for each in rows.event_worker]
    known = set(EventKind)
    kinds = [EventKind(each) if each in known else EventKind.POLICY_CHANGED for each in rows.event_kind.tolist()]
    times = (timeline.origin_secs + rows.event_time).tolist()
    return tuple(zip(times, names, kinds, map(str, rows.event_text), strict=True))[::-1]
