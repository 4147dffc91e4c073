# SPDX-License-Identifier: Apache-2.0
"""Advice from the update log of a run: its measured gradients, replayed under its own policy and under others.

Each worker's gradients are replayed in the order in which they were measured, so a worker that is always slow stays
slow. `tfdist advise LOGDIR` and the page in TensorBoard show the same `Advice`. NumPy only, no TensorFlow.

    cycle of a synchronous worker     | gradient: start to arrival | wait | overhead: last arrival to next start |
    cycle of an asynchronous worker   | gradient: start to arrival | held by the policy | gap |

Overhead (sums, optimizer, Keras' loop) and gaps are those of the run. So replays hold for links like those of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

import tfdist.flags
from tfdist.planning.simulation import engines
from tfdist.planning.simulation.event_loop import Costs, EventLoop
from tfdist.policies import backup_workers, composition
from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Aggregation
from tfdist.telemetry import report
from tfdist.telemetry.update_log import Contributions, EventKind, Outcome, Timeline, Updates

# A replay that misses its own run by more than this is no ground for advice.
TOLERANCE = 0.15
# Least gain of gradients per second that is worth a change, and the share that counts as the same speed.
_LEAST_GAIN, _SAME = 1.05, 0.98
_LEAST_UPDATES, _MOST_GRADIENTS, _MOST_SAMPLES = 30, 20_000, 50
# Share of the updates at the beginning that trace, and find caches cold; and replayed updates that don't count.
_BEGINNING, _FIRST = 0.1, 4
# Policies that decide about no gradient.
_NOT_REPLAYED = ("Compression", "LazyRows", "Warmup")


class ReplayError(ValueError):
    """A run that nothing can be said of. The message is one line with the reason."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting, and its replay.

    Attributes:
      workers: names of the workers.
      spares: of `BackupWorkers`; None for the policies of the run.
      updates_per_sec: updates.
      gradients_per_sec: gradients that enter updates; each is of one worker's batch.
    """

    workers: tuple[str, ...]
    spares: int | None
    updates_per_sec: float
    gradients_per_sec: float


def advise(timeline: Timeline, counts: Sequence[int] = ()) -> Advice:
    """Replays a run as it was, with other spares, and with its fastest workers alone.

    Args:
      timeline: the run.
      counts: more numbers of workers to replay, at most those of the run: the fastest ones are taken.

    Raises:
      ReplayError: the run is too short, has policies that can't be replayed, or its replay misses it.
    """
    run = Advice(timeline)
    now = run.replay(run.workers, None)
    if abs(now.updates_per_sec / run.measured - 1) > TOLERANCE:
        raise ReplayError(
            f"no advice: the replay makes {now.updates_per_sec:.3g} updates/s where the run made {run.measured:.3g}"
        )
    cases = [now]
    total = len(run.workers)
    for count in sorted({1, total - run.slow, total, *counts} & set(range(1, total + 1))):
        cases += [run.replay(run.workers[:count], spares) for spares in run.spares(run.workers[:count])]
    best = max(cases, key=lambda case: case.gradients_per_sec)
    if best.gradients_per_sec < _LEAST_GAIN * now.gradients_per_sec:
        best = now
    # Of those that are as fast, the one with the fewest workers; of these, with the most gradients in an update.
    same = [case for case in cases if case.gradients_per_sec >= _SAME * best.gradients_per_sec]
    run.chosen = min(same, key=lambda case: (len(case.workers), case is not best, -case.gradients_per_sec))
    run.cases, run.text = tuple(cases), _in_words(run, now, run.chosen)
    return run


def _in_words(run: Advice, now: Case, chosen: Case) -> str:
    if chosen is now:
        policies = ", ".join(run.policies) or "no policy"
        workers = f"{len(now.workers)} worker{'s' * (len(now.workers) > 1)}"
        return f"keep {workers} and {policies}: nothing that was replayed is faster"
    without = [name for name in now.workers if name not in chosen.workers]
    few = len(without) < 3
    leave = f"leave out {' and '.join(without) if few else f'{without[-1]} and {len(without) - 1} others'}"
    changed = chosen.spares is not None and chosen.spares != run.own_spares and len(chosen.workers) > 1
    parts = [leave if without else "", f"set BackupWorkers(spares={chosen.spares})" if changed else ""]
    if len(chosen.workers) == 1 < len(now.workers):
        parts = [f"use one device, {next(iter(chosen.workers))} alone"]
    gain = chosen.gradients_per_sec / now.gradients_per_sec - 1
    speed = f"{gain:.0%} more gradients per second" if gain > 1 - _SAME else "same speed"
    return f"{' and '.join(filter(None, parts))}: {speed}"


class Advice:
    """Gradients of each worker of a run, their replays, and what these recommend; made by `advise`.

    Attributes:
      workers: names, the fastest first.
      slow: number of those that are slower than all others.
      updates: number of updates that are replayed.
      measured: updates per second of the run, without validations and checkpoints.
      examples: examples of a gradient; 0 if the log does not say.
      policies: the policies of the run, as text.
      own_spares: spares of the run; None for other policies.
      cases: the replay of the run as it was first; then the others.
      chosen: the recommended one of `cases`.
      text: the recommendation in one line.
    """

    cases: tuple[Case, ...]
    chosen: Case
    text: str

    def __init__(self, timeline: Timeline) -> None:
        self._header, self.policies = timeline.header, timeline.header.policies
        policy = self._policy(len(timeline.workers))
        self.own_spares = policy.spares if isinstance(policy, BackupWorkers) else None
        updates, rows = _steady(timeline)
        self.updates, times, events = len(updates), updates.time, timeline.events
        inside = (events.event_time > times[0]) & (events.event_time < times[-1])
        pauses = float(events.event_secs[inside].sum())
        self.measured = _rate(times, pauses)
        accepted = rows.outcome == Outcome.ACCEPTED
        self.examples = int(updates.examples.sum()) / max(1, int(np.count_nonzero(accepted)))
        slow = report.of_log(updates, rows, timeline.workers).slow
        self.slow = len(slow.names) if slow else 0
        made = np.repeat(updates.time, updates.count)
        # Without a policy a worker begins when the update before was made: with callbacks, and the optimizer.
        is_timed = np.repeat(updates.reduce > 0, updates.count)
        opened = np.repeat(updates.opened, updates.count)
        start, arrival = made + np.where(is_timed, -opened, rows.start), made + rows.arrival
        self._overhead, begins = 0.0, None
        if policy.is_synchronous:
            self._overhead, begins = _overhead(updates, start, np.where(accepted, arrival, -np.inf), pauses)
        self._secs: dict[str, list[float]] = {}
        for worker, name in enumerate(timeline.workers):
            mine = np.flatnonzero((rows.worker == worker) & (rows.outcome != Outcome.LOST))
            mine = mine[np.argsort(arrival[mine], kind="stable")]
            if len(mine) > 1:
                self._secs[name] = _durations(start[mine], arrival[mine], rows.held[mine], begins, pauses).tolist()
        self.workers = tuple(sorted(self._secs, key=lambda name: float(np.mean(self._secs[name]))))
        if not self.workers:
            raise ReplayError("no advice: no worker has sent two gradients")

    def _policy(self, replicas: int) -> Aggregation:
        """Returns a new policy as that of the run, for so many replicas."""
        given = [each for each in self._header.policies if each.partition("(")[0] not in _NOT_REPLAYED]
        try:
            policies = [tfdist.flags.parse_policy(each, "policies") for each in given]
            composed = composition.compose(policies, self._header.strategy, replicas)
        except ValueError as error:
            raise ReplayError(f"no advice: {error}") from None
        if composed.averaging is not None:
            raise ReplayError("no advice: with ParameterAveraging no update is made of gradients")
        return engines.aggregation(self._header.strategy, composed, replicas)

    def spares(self, workers: Sequence[str]) -> Sequence[int | None]:
        """Returns the numbers of spares to replay with these workers; [None] where updates wait for no spares."""
        count, all_of_them = len(workers), len(workers) == len(self.workers)
        if self.own_spares is None:
            return [] if all_of_them else [None]
        samples = [self._secs[name][:: -(-len(self._secs[name]) // _MOST_SAMPLES)] for name in workers]
        best, _ = backup_workers.best_spares(samples, count, count - 1)
        around = {self.own_spares - 1, self.own_spares + 1} if all_of_them else {self.own_spares}
        wanted = {each for each in {0, best, *around} if 0 <= each < count}
        return sorted(wanted - {self.own_spares}) if all_of_them else sorted(wanted)

    def replay(self, workers: Sequence[str], spares: int | None) -> Case:
        """Simulates as many updates as were measured, on these workers; spares=None keeps the policy of the run."""
        if spares is None:
            policy = self._policy(len(workers))
        else:
            policy = BackupWorkers(spares=spares)
            policy.begin(len(workers), self._header.strategy)
        secs = [self._secs[name] for name in workers]
        costs = Costs(update_secs=lambda taking_part: self._overhead)
        loop = EventLoop(policy, lambda replica, attempt: secs[replica][attempt % len(secs[replica])], costs)
        count = min(self.updates, max(_LEAST_UPDATES, _MOST_GRADIENTS // len(workers)))
        loop.run(count)
        rate = _rate(np.array(loop.times[_FIRST:]))
        gradients = sum(len(update.contributors) for update in loop.updates) / count
        return Case(tuple(workers), spares, rate, rate * gradients)


def _steady(timeline: Timeline) -> tuple[Updates, Contributions]:
    """Returns the longest run of updates on the same workers, without the beginning; of many the newest."""
    updates, events = timeline.updates, timeline.events
    changes = events.event_time[np.isin(events.event_kind, (EventKind.LOST, EventKind.RETURNED, EventKind.RESUMED))]
    warm = int(_BEGINNING * len(updates)) + int(np.count_nonzero(updates.phase))
    edges = np.unique(np.clip([warm, *np.searchsorted(updates.time, changes, "right"), len(updates)], warm, None))
    longest = int(np.argmax(np.diff(edges))) if len(edges) > 1 else 0
    part = updates[int(edges[longest]) : int(edges[min(longest + 1, len(edges) - 1)])]
    offsets = updates.offsets[int(edges[longest])], updates.offsets[int(edges[longest]) + len(part)]
    if len(part) < _LEAST_UPDATES:
        raise ReplayError(
            f"no advice: {len(part)} updates on the same workers, and {_LEAST_UPDATES} are needed; train longer first"
        )
    return report.newest(part, timeline.contributions[int(offsets[0]) : int(offsets[1])], _MOST_GRADIENTS)


def _rate(times: np.ndarray, pauses_secs: float = 0.0) -> float:
    return float((len(times) - 1) / max(times[-1] - times[0] - pauses_secs, 1e-9))


def _overhead(
    updates: Updates, start: np.ndarray, accepted: np.ndarray, pauses_secs: float
) -> tuple[float, np.ndarray]:
    """Returns the mean time from the last gradient of an update to the first start of the next, and those starts.

    Args:
      updates: consecutive updates.
      start: start of each gradient.
      accepted: its arrival; -inf if it did not enter the update.
      pauses_secs: length of all validations and checkpoints.
    """
    some = updates.count > 0
    limits = updates.offsets[:-1][some]
    last = np.maximum.reduceat(accepted, limits)
    of_update = np.repeat(np.arange(len(limits)), updates.count[some])
    # A gradient that was late for an earlier update began before.
    is_new = np.isfinite(accepted) & (of_update > 0) & (start >= np.roll(last, 1)[of_update])
    first = np.full(len(limits), np.inf)
    np.minimum.at(first, of_update[is_new], start[is_new])
    gaps = (first[1:] - last[:-1])[np.isfinite(first[1:]) & np.isfinite(last[:-1])]
    overhead = (gaps.sum() - pauses_secs) / max(1, len(gaps))
    return max(0.0, float(overhead)), first[np.isfinite(first)]


def _durations(
    start: np.ndarray, arrival: np.ndarray, held: np.ndarray, begins: np.ndarray | None, pauses_secs: float
) -> np.ndarray:
    """Returns the seconds of one worker's gradients, with the time before in which it was neither busy nor held.

    Args:
      start: start of each gradient, of two at least, in the order of the arrivals.
      arrival: its arrival.
      held: for how long the policy held the worker before it.
      begins: first start of each step, of a synchronous run; None for an asynchronous one.
      pauses_secs: length of all validations and checkpoints.
    """
    before = arrival[:-1]
    if begins is None:
        return arrival - start + max(0.0, float(np.sum(start[1:] - before - held[1:]) - pauses_secs)) / len(before)
    # An idle worker begins with its step, a late one where it has ended.
    step = np.searchsorted(begins, start, "right") - 1
    opened = np.where(step >= 0, begins[np.maximum(step, 0)], start) if len(begins) else start
    since = np.minimum(np.maximum(opened[1:], before), start[1:])
    return np.append(arrival[0] - start[0], arrival[1:] - since)
