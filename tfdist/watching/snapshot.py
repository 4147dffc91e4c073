# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job at one moment: the whole cluster, and one row for each worker. Pure functions of a `Timeline`."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from tfdist.update_log import Contributions, EventKind, Outcome, Timeline, Updates
from tfdist.watching.lanes import Lanes

# A worker whose next gradient takes longer than this multiple of its 95th percentile is shown with the time.
_LATE_FACTOR = 3.0
_LATE_SECS = 1.0
_MAX_GRADIENTS = 500_000
_MOMENTS = ("held", "computing", "waiting")


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """One worker. Counts are those of the whole job; all else is measured in the window.

    Attributes:
      name: name of the worker, such as "worker:3".
      state: "computing", "waiting", "held", "lost", or "absent" if it has sent no gradient yet.
      late_secs: time since its last gradient, if that is unusually long; else 0.
      accepted, dropped, lost: gradients.
      p50_secs, p95_secs: percentiles of the time from start to arrival of a gradient; nan without any.
      staleness_mean, staleness_max: of the accepted gradients; nan and 0 without any.
      compute, wait, held: shares of the window.
      cost: what the worker took from the cluster, in workers: 1.0 is all of one worker's time. See `_costs`.
    """

    name: str
    state: str
    late_secs: float
    accepted: int
    dropped: int
    lost: int
    p50_secs: float
    p95_secs: float
    staleness_mean: float
    staleness_max: int
    compute: float
    wait: float
    held: float
    cost: float


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
      window_secs: length of the window that the rates are measured in.
      updates_per_sec, examples_per_sec: rates; examples are nan if they are unknown.
      wait: share of the window in which the updates waited for gradients.
      workers: rows; lost workers first, then those that cost most.
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
    window_secs: float
    updates_per_sec: float
    examples_per_sec: float
    wait: float
    workers: tuple[WorkerRow, ...]
    events: tuple[tuple[float, str, EventKind, str], ...]


def take(timeline: Timeline, window_secs: float = 60.0, max_events: int = 20) -> Snapshot:
    """Computes the numbers of the last `window_secs` before a job's last update."""
    updates, contributions = _window(timeline, window_secs)
    begin, end = _limits(updates)
    secs = end - begin
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
        window_secs=secs,
        updates_per_sec=len(updates) / secs if secs else np.nan,
        examples_per_sec=examples / secs if secs and examples else np.nan,
        wait=min(1.0, float(updates.wait.sum()) / secs) if secs else np.nan,
        workers=_rows(timeline, updates, contributions),
        events=_events(timeline, max_events),
    )


def _window(timeline: Timeline, secs: float) -> tuple[Updates, Contributions]:
    updates, time = timeline.updates, timeline.updates.time
    if not len(updates):
        return updates, timeline.contributions
    first, offsets = int(np.searchsorted(np.maximum.accumulate(time), time[-1] - secs)), updates.offsets
    # A window of many gradients is shortened, so that a refresh takes no longer than a second or two.
    first = max(first, int(np.searchsorted(offsets[:-1], offsets[-1] - _MAX_GRADIENTS)))
    first = min(first, len(updates) - 1)
    return updates[first:], timeline.contributions[int(offsets[first]) :]


def _limits(updates: Updates) -> tuple[float, float]:
    if not len(updates):
        return 0.0, 0.0
    return float(updates.time[0] - updates.opened[0]), float(updates.time.max())


def _last(columns: np.ndarray, older: np.ndarray, default: float) -> float:
    return next((each[-1] for each in (columns, older) if len(each)), default)


def _rows(timeline: Timeline, updates: Updates, contributions: Contributions) -> tuple[WorkerRow, ...]:
    count = len(timeline.workers)
    begin, end = _limits(updates)
    lanes = Lanes.of(updates, contributions)
    secs = contributions.arrival - contributions.start
    p50, p95 = _percentiles(contributions.worker, secs, count, (50, 95))
    shares = _shares(lanes, count, begin, end)
    costs = _costs(updates, contributions, count) / max(end - begin, 1e-9)
    mean, largest = _staleness(contributions, count)
    accepted, dropped, lost = _totals(timeline)
    states, late = _states(timeline, updates, contributions, lanes, p95, accepted + dropped + lost > 0)
    rows = [
        WorkerRow(
            name,
            states[i],
            float(late[i]),
            int(accepted[i]),
            int(dropped[i]),
            int(lost[i]),
            float(p50[i]),
            float(p95[i]),
            float(mean[i]),
            int(largest[i]),
            *(float(each[i]) for each in shares),
            cost=float(costs[i]),
        )
        for i, name in enumerate(timeline.workers)
    ]
    # A lost worker costs all of its time. Where costs are equal, as with asynchronous updates, the slowest is first.
    return tuple(sorted(rows, key=lambda row: (row.state != "lost", -round(row.cost, 2), -np.nan_to_num(row.p50_secs))))


def _percentiles(worker: np.ndarray, values: np.ndarray, count: int, ranks: tuple[int, ...]) -> list[np.ndarray]:
    """Returns percentiles of the values of each worker, by the nearest rank; nan without any value."""
    order = np.lexsort((values, worker))
    ordered, sizes = values[order], np.bincount(worker, minlength=count)
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    results = []
    for rank in ranks:
        index = begins + np.maximum(np.ceil(sizes * rank / 100).astype(int) - 1, 0)
        picked = ordered[np.minimum(index, max(len(ordered) - 1, 0))] if len(ordered) else np.zeros(count)
        results.append(np.where(sizes > 0, picked, np.nan))
    return results


def _shares(lanes: Lanes, count: int, begin: float, end: float) -> list[np.ndarray]:
    """Returns the shares of [begin, end] in which each worker computed, waited and was held."""
    limits = [np.clip(each, begin, end) for each in (lanes.held, lanes.start, lanes.arrival, lanes.end)]
    held, compute, wait = (np.bincount(lanes.worker, b - a, count) for a, b in itertools.pairwise(limits))
    return [each / max(end - begin, 1e-9) for each in (compute, wait, held)]


def _costs(updates: Updates, contributions: Contributions, count: int) -> np.ndarray:
    """Returns the worker-seconds that each worker cost the cluster.

    These are the seconds of its gradients that were dropped or lost, and for each update whose last gradient was its
    own: the time since the gradient before, in which all other workers of the update waited.
    """
    is_accepted = contributions.outcome == Outcome.ACCEPTED
    secs = np.maximum(contributions.arrival - contributions.start, 0)
    costs = np.bincount(contributions.worker, np.where(is_accepted, 0, secs), count)
    update = np.repeat(np.arange(len(updates)), updates.count)[is_accepted]
    worker, arrival = contributions.worker[is_accepted], contributions.arrival[is_accepted]
    order = np.lexsort((arrival, update))
    update, worker, arrival = update[order], worker[order], arrival[order]
    if len(update) < 2:
        return costs
    is_last = np.append(update[1:] != update[:-1], True)
    is_same = np.concatenate([[False], update[1:] == update[:-1]])
    gap = np.where(is_same, arrival - np.roll(arrival, 1), 0.0)
    others = np.bincount(update, minlength=len(updates))[update] - 1
    return costs + np.bincount(worker[is_last], (gap * others)[is_last], count)


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
        limits = np.stack([lanes.held, lanes.start, lanes.arrival, lanes.end])
        for number, state in enumerate(_MOMENTS):
            for index in lanes.worker[(limits[number] <= moment) & (moment < limits[number + 1])]:
                states[index] = state
        since = _since(lanes, updates, count)
        is_late = (since > np.maximum(_LATE_FACTOR * np.nan_to_num(p95), _LATE_SECS)) & is_known
        late = np.where(is_late, since, 0.0)
        for index in np.flatnonzero(is_late):
            states[index] = "computing"
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
    rows = timeline.events[-most:] if most else timeline.events[:0]
    names = [timeline.workers[each] if 0 <= each < len(timeline.workers) else "" for each in rows.event_worker]
    known = set(EventKind)
    kinds = [EventKind(each) if each in known else EventKind.POLICY_CHANGED for each in rows.event_kind.tolist()]
    times = (timeline.origin_secs + rows.event_time).tolist()
    return tuple(zip(times, names, kinds, map(str, rows.event_text), strict=True))[::-1]
