# SPDX-License-Identifier: Apache-2.0
"""Converts a timeline into events of the Trace Event Format, which Perfetto and chrome://tracing load.

Format: "Trace Event Format" of the Chromium authors, object form; times are microseconds. A job is a process. Its lane
(thread) 0 has an instant event for each update; each worker has a lane with slices (complete events) for the time in
which it was held back, computed and waited, and instant events for gradients that were dropped or lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdist.update_log import Contributions, EventKind, Outcome, Timeline, Updates
from tfdist.watching.lanes import Lanes

_MAX_POINTS = 2000
_MICROSECONDS = 1e6
_COMPUTE = {Outcome.ACCEPTED: "compute", Outcome.DROPPED: "compute (dropped)", Outcome.LOST: "compute (lost)"}
_KINDS = {
    EventKind.LOST: "lost",
    EventKind.RETURNED: "returned",
    EventKind.POLICY_CHANGED: "policy changed",
    EventKind.PHASE_CHANGED: "phase changed",
    EventKind.RESUMED: "resumed from a checkpoint",
    EventKind.RESTARTED: "restarted",
    EventKind.VALIDATION: "validation",
    EventKind.CHECKPOINT: "checkpoint",
    EventKind.FINISHED: "end",
}


class TraceEvents:
    """Events of one job.

    Args:
      timeline: the job.
      first, last: indices of the first update, and of the update behind the last one.
      pid: number of the process in the trace.
      name: name of the process.
      shift_secs: seconds that are added to the times of the timeline.
    """

    def __init__(self, timeline: Timeline, first: int, last: int, pid: int, name: str, shift_secs: float) -> None:
        offsets = timeline.updates.offsets
        self._timeline = timeline
        self._pid = pid
        self._name = name
        self._updates: Updates = timeline.updates[first:last]
        self._contributions: Contributions = timeline.contributions[int(offsets[first]) : int(offsets[last])]
        self._lanes = Lanes.of(self._updates, self._contributions)
        self._shift = shift_secs

    @property
    def begin(self) -> float:
        """Time of the earliest event on the clock of the timeline; inf without updates."""
        begins = [self._updates.time - self._updates.opened, self._lanes.held]
        return min((float(each.min()) for each in begins if len(each)), default=np.inf)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the events: those of a lane, and those of a counter, in the order of time."""
        yield from self._names()
        yield from self._update_lane()
        for worker in range(len(self._timeline.workers)):
            yield from self._worker_lane(worker)
        yield from self._counters()

    def _names(self) -> Iterator[dict[str, Any]]:
        yield self._metadata("process_name", 0, name=self._name)
        for tid, name in enumerate(("updates", *self._timeline.workers)):
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=tid)

    def _metadata(self, title: str, tid: int, **values: Any) -> dict[str, Any]:
        return {"name": title, "ph": "M", "pid": self._pid, "tid": tid, "args": values}

    def _update_lane(self) -> Iterator[dict[str, Any]]:
        updates = self._updates
        columns = (updates.time, updates.step, updates.wait, updates.examples, updates.phase, updates.count)
        events = []
        for time, step, wait, examples, phase, count in zip(*(each.tolist() for each in columns), strict=True):
            values = {"step": step, "wait_ms": round(wait * 1e3, 3), "examples": examples, "gradients": count}
            events.append(self._instant("update", time, 0, {**values, **({"phase": "warmup"} if phase else {})}))
        yield from _by_time([*events, *self._log_events(-1)])

    def _log_events(self, worker: int) -> Iterator[dict[str, Any]]:
        """Yields the log's events of a worker; -1: those of the policy, or of all."""
        events, updates, known = self._timeline.events, self._updates, set(EventKind)
        if not len(updates):
            return
        begin, end = float(updates.time[0] - updates.opened[0]), float(updates.time.max())
        chosen = (events.event_worker == worker) & (events.event_time >= begin) & (events.event_time <= end)
        for index in np.flatnonzero(chosen):
            kind = int(events.event_kind[index])
            name = _KINDS[EventKind(kind)] if kind in known else f"event {kind}"
            text = {"text": str(events.event_text[index])}
            time, secs = float(events.event_time[index]), float(events.event_secs[index])
            if secs > 0:
                yield from self._slice(name, time, time + secs, worker + 1, text)
            else:
                yield self._instant(name, time, worker + 1, text, "t" if worker >= 0 else "p")

    def _worker_lane(self, worker: int) -> Iterator[dict[str, Any]]:
        lanes, gradients = self._lanes, self._contributions
        low, high = np.searchsorted(lanes.worker, [worker, worker + 1]).tolist()
        rows = lanes.row[low:high]
        columns = (
            *(each[low:high] for each in lanes.limits),
            self._updates.step[lanes.update[low:high]],
            *(each[rows] for each in (gradients.outcome, gradients.staleness, gradients.weight)),
        )
        events = list(self._log_events(worker))
        for held, start, read, arrival, summing, end, step, code, staleness, weight in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            outcome = Outcome(code) if code in _COMPUTE else Outcome.LOST
            values = {"update": step, "staleness": staleness, "weight": round(weight, 6)}
            events.extend(self._slice("held", held, start, worker + 1, {"update": step}))
            events.extend(self._slice("input", start, read, worker + 1, {"update": step}))
            events.extend(self._slice(_COMPUTE[outcome], read, arrival, worker + 1, values))
            events.extend(self._slice("wait", arrival, summing, worker + 1, {"update": step}))
            events.extend(self._slice("all-reduce", summing, end, worker + 1, {"update": step}))
            if outcome != Outcome.ACCEPTED:
                name = "gradient dropped" if outcome == Outcome.DROPPED else "gradient lost"
                events.append(self._instant(name, arrival, worker + 1, values))
        yield from _by_time(events)

    def _counters(self) -> Iterator[dict[str, Any]]:
        """Yields updates per second, and staleness, at up to 2,000 moments."""
        updates, gradients = self._updates, self._contributions
        if not len(updates):
            return
        begin, end = float(updates.time[0] - updates.opened[0]), float(updates.time.max())
        count = min(_MAX_POINTS, max(1, len(updates) // 4))
        width = max(end - begin, 1e-6) / count
        place = np.clip(((updates.time - begin) / width).astype(int), 0, count - 1)
        rates = np.bincount(place, minlength=count) / width
        is_accepted = gradients.outcome == Outcome.ACCEPTED
        of_update = np.repeat(place, updates.count)[is_accepted]
        staleness = gradients.staleness[is_accepted]
        sizes = np.bincount(of_update, minlength=count)
        means = np.bincount(of_update, staleness, count) / np.maximum(sizes, 1)
        largest = np.zeros(count, np.int64)
        np.maximum.at(largest, of_update, staleness)
        for name, values in (("updates/s", rates), ("staleness mean", means), ("staleness max", largest)):
            for index, value in enumerate(values.tolist()):
                yield {
                    "name": name,
                    "ph": "C",
                    "ts": self._ts(begin + index * width),
                    "pid": self._pid,
                    "tid": 0,
                    "args": {name.rpartition(" ")[2]: round(value, 4)},
                }

    def _ts(self, time: float) -> float:
        return round(max(0.0, time + self._shift) * _MICROSECONDS, 3)

    def _slice(self, name: str, begin: float, end: float, tid: int, values: dict[str, Any]) -> list[dict[str, Any]]:
        ts, until = self._ts(begin), self._ts(end)
        if until <= ts:
            return []
        where = {"ts": ts, "dur": round(until - ts, 3), "pid": self._pid, "tid": tid}
        return [{"name": name, "cat": "gradient", "ph": "X", **where, "args": values}]

    def _instant(self, name: str, time: float, tid: int, values: dict[str, Any], scope: str = "t") -> dict[str, Any]:
        where = {"ts": self._ts(time), "pid": self._pid, "tid": tid}
        return {"name": name, "cat": "event", "ph": "i", "s": scope, **where, "args": values}


def _by_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: event["ts"])


def encoded(jobs: list[TraceEvents], other: dict[str, Any]) -> Iterator[str]:
    """Yields the text of a trace: one event on each line."""
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":['
    separator = "\n"
    for job in jobs:
        for event in job:
            yield separator + json.dumps(event, separators=(",", ":"), allow_nan=False)
            separator = ",\n"
    yield "\n]}\n"
