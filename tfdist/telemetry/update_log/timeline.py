# SPDX-License-Identifier: Apache-2.0
"""Merges the logs of all tasks of a job into one `Timeline`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from tfdist.telemetry.update_log import segments, summary
from tfdist.telemetry.update_log.columns import Columns, Contributions, Events, Groups, Updates
from tfdist.telemetry.update_log.records import EventKind, Header

# Clocks of hosts differ: a training has not ended if it makes updates so long after its end.
_APART_SECS = 1.0


@dataclasses.dataclass(frozen=True)
class Log:
    """Segments of one log, in the order of their updates. `path` is its directory."""

    path: str
    header: Header
    summaries: list[segments.Summary]
    details: list[segments.Detail]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """All logs of one job. Times are seconds after `origin_secs`.

    Attributes:
      job: identifier of the job.
      headers: header of each log, by its directory.
      workers: names of all workers; the columns have indices into it.
      origin_secs: Unix time of second 0.
      groups: the oldest updates, in groups.
      updates: all later ones, in order.
      contributions: their gradients, in the order of the updates.
      events: all events, by time.
    """

    job: str
    headers: dict[str, Header]
    workers: tuple[str, ...]
    origin_secs: float
    groups: Groups
    updates: Updates
    contributions: Contributions
    events: Events

    @property
    def header(self) -> Header:
        """Header of the first log."""
        return next(iter(self.headers.values()))

    @property
    def num_updates(self) -> int:
        """Number of updates, aggregated ones included."""
        return int(self.groups.updates.sum()) + len(self.updates)

    @property
    def span(self) -> tuple[float, float]:
        """Time of the opening of the first update, and of the last update; (0, 0) without any."""
        begins = [*self.groups.begin[:1], *(self.updates.time[:1] - self.updates.opened[:1])]
        ends = [*self.groups.end[-1:], *self.updates.time[-1:]]
        return (float(min(begins)), float(max(ends))) if ends else (0.0, 0.0)

    @property
    def ended(self) -> str:
        """Text of the event that ended the training; "" while it runs, or where no log says so."""
        ends = np.flatnonzero(self.events.event_kind == EventKind.FINISHED)
        is_last = len(ends) and not (self.updates.time[-1:] > self.events.event_time[ends[-1]] + _APART_SECS).any()
        return str(self.events.event_text[ends[-1]]) if is_last else ""

    def update_of(self) -> np.ndarray:
        """Returns the index of the update of each contribution: int32 [m]."""
        return np.repeat(np.arange(len(self.updates), dtype=np.int32), self.updates.count)

    def total(self) -> Groups:
        """Adds up the whole timeline: one group, or none without any update."""
        begin = np.zeros(min(1, len(self.updates)), np.int64)
        detail = summary.summarize(self.updates, self.contributions, begin, len(self.workers))
        whole = Groups.concatenated([self.groups, detail])
        return summary.regroup(whole, np.zeros(min(1, len(whole)), np.int64))


def merged(logs: Iterable[Log]) -> tuple[Timeline, ...]:
    """Merges the logs of each job; the job with the newest update is last."""
    jobs: dict[str, list[Log]] = {}
    for log in sorted(logs, key=lambda each: (each.header.origin_secs + _begin(each), each.path)):
        jobs.setdefault(log.header.job, []).append(log)
    timelines = [_timeline(job, each) for job, each in jobs.items()]
    return tuple(sorted(timelines, key=lambda each: each.origin_secs + each.span[1]))


def _begin(log: Log) -> float:
    for each in log.summaries:
        if len(each.groups):
            return float(each.groups.begin[0])
    return next((float(each.updates.time[0]) for each in log.details if each.num_updates), 0.0)


def _timeline(job: str, logs: Sequence[Log]) -> Timeline:
    workers = tuple(sorted({name for log in logs for name in log.header.workers}, key=_natural))
    origin = logs[0].header.origin_secs
    parts = [_part(log, workers, log.header.origin_secs - origin) for log in logs]
    groups, updates, contributions = _joined(logs, parts, len(workers))
    events = Events.concatenated([each.events for each in parts])
    return Timeline(
        job=job,
        headers={log.path: log.header for log in logs},
        workers=workers,
        origin_secs=origin,
        groups=groups,
        updates=updates,
        contributions=contributions,
        events=events[np.argsort(events.event_time, kind="stable")][-segments.MAX_EVENTS :],
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """Columns of one log, with the times and workers of the timeline."""

    groups: Groups
    updates: Updates
    contributions: Contributions
    events: Events


def _part(log: Log, workers: Sequence[str], shift: float) -> _Part:
    groups = Groups.concatenated([each.groups for each in log.summaries], workers=len(log.header.workers))
    updates = Updates.concatenated([each.updates for each in log.details])
    contributions = Contributions.concatenated([each.contributions for each in log.details])
    events = Events.concatenated([each.events for each in (*log.summaries, *log.details)])
    if shift:
        groups = groups.replace(begin=groups.begin + shift, end=groups.end + shift)
        updates = updates.replace(time=updates.time + shift)
        events = events.replace(event_time=events.event_time + shift)
    place = {name: index for index, name in enumerate(workers)}
    index = np.array([place[name] for name in log.header.workers], np.int64)
    if tuple(workers) != log.header.workers:
        groups = groups.replace(**{name: _spread(getattr(groups, name), index, len(workers)) for name in Groups.CELLS})
        contributions = contributions.replace(worker=index[contributions.worker])
        known = (events.event_worker >= 0) & (events.event_worker < len(index))
        events = events.replace(event_worker=np.where(known, index[np.where(known, events.event_worker, 0)], -1))
    return _Part(groups, updates, contributions, events)


def _spread(cells: np.ndarray, index: np.ndarray, workers: int) -> np.ndarray:
    spread = np.zeros((len(cells), workers), cells.dtype)
    spread[:, index] = cells
    return spread


def _joined(logs: Sequence[Log], parts: Sequence[_Part], workers: int) -> tuple[Groups, Updates, Contributions]:
    """Joins the logs of one task one behind the other; updates of different tasks are merged by their step."""
    writers: dict[str, list[_Part]] = {}
    for log, part in zip(logs, parts, strict=True):
        writers.setdefault(log.header.writer, []).append(part)
    groups = [Groups.concatenated([part.groups for part in each], workers=workers) for each in writers.values()]
    updates = [Updates.concatenated([part.updates for part in each]) for each in writers.values()]
    gradients = [Contributions.concatenated([part.contributions for part in each]) for each in writers.values()]
    if len(writers) == 1:
        return groups[0], updates[0], gradients[0]
    return _merged_groups(groups), *_merged_updates(updates, gradients)


def _passes(step: np.ndarray) -> np.ndarray:
    """Counts how often a task went back to an earlier step, for each update: its pass over the steps."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(step[1:] < step[:-1])]) if len(step) else step


def _merged_updates(
    updates: Sequence[Updates], contributions: Sequence[Contributions]
) -> tuple[Updates, Contributions]:
    """Merges updates of the same step: an update is made when its last task has made it."""
    key = np.stack([np.concatenate([_passes(u.step) for u in updates]), np.concatenate([u.step for u in updates])])
    rows, gradients = Updates.concatenated(updates), Contributions.concatenated(contributions)
    if not len(rows):
        return rows, gradients
    order = np.lexsort((key[1], key[0]))
    key = key[:, order]
    begins = np.flatnonzero(np.concatenate([[True], np.any(key[:, 1:] != key[:, :-1], axis=0)]))
    target = np.empty(len(rows), np.int64)
    target[order] = np.cumsum(np.bincount(begins, minlength=len(rows))) - 1
    ordered = rows[order]
    largest = {
        n: np.maximum.reduceat(getattr(ordered, n), begins) for n in ("time", "opened", "wait", "phase", "reduce")
    }
    sums = {n: np.add.reduceat(getattr(ordered, n), begins) for n in ("examples", "count")}
    whole = Updates.of(step=ordered.step[begins], **largest, **sums)
    # The times of gradients count from the merged update now.
    late = np.repeat((rows.time - whole.time[target]).astype(np.float32), rows.count)
    gradients = gradients.replace(start=gradients.start + late, arrival=gradients.arrival + late)
    return whole, gradients[np.argsort(np.repeat(target, rows.count), kind="stable")]


def _merged_groups(parts: Sequence[Groups]) -> Groups:
    """Merges groups of the same steps; all are as large as the largest."""
    spans = [each.last_step - each.first_step for each in parts]
    is_coarse = any(len(each) and each.max() >= summary.GROUP_STEPS for each in spans)
    steps = summary.COARSE_GROUP_STEPS if is_coarse else summary.GROUP_STEPS
    regrouped = [summary.regroup(each, summary.buckets(each.first_step, steps)) for each in parts]
    rows = Groups.concatenated(regrouped)
    if not len(rows):
        return rows
    passes = np.concatenate([_passes(each.first_step) for each in regrouped])
    order = np.lexsort(((rows.first_step - 1) // steps, passes))
    bucket = np.stack([passes, (rows.first_step - 1) // steps])[:, order]
    begins = np.flatnonzero(np.concatenate([[True], np.any(bucket[:, 1:] != bucket[:, :-1], axis=0)]))
    rows = rows[order]
    merged_rows = summary.regroup(rows, begins)

    def largest(columns: Columns, name: str) -> np.ndarray:
        return np.maximum.reduceat(getattr(columns, name), begins)

    names = ("last_step", "end", "updates", "wait", "phase", "reduce_secs")
    smallest = {n: np.minimum.reduceat(getattr(rows, n), begins) for n in ("first_step", "begin")}
    return merged_rows.replace(**smallest, **{n: largest(rows, n) for n in names})


def _natural(name: str) -> str:
    """Sorts "worker:10" behind "worker:9"."""
    return re.sub(r"\d+", lambda number: number[0].zfill(12), name)


# Run directory of a job, from the directories of its logs.


# The chief, or each worker, writes its log to a directory of its own below the run's.
_WRITER = re.compile(r"(^|/)(policy|workers/[^/]+)$")
_LOG = re.compile(r"(^|/)updates(_\d+)?$")


def run_directory(timeline: Timeline) -> str:
    """Returns the path of a job's run directory, below the log directory; "" for the log directory itself."""
    return _WRITER.sub("", _LOG.sub("", min(timeline.headers)))
