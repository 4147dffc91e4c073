# SPDX-License-Identifier: Apache-2.0
"""`Report`, the result of `strategy.report()`, and all that is said of workers: times, who delays, a line in words.

`tfdist watch`, the page in TensorBoard and `strategy.report()` all show a `Report`: of an update log it is made by
`of_log`. No TensorFlow import.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.histogram import Histogram, add_rows
from tfdist.telemetry.update_log import Contributions, Updates

# Beyond so many workers or tasks a table shows some of them, and their number.
_MOST_ROWS = 8
_MOST_LISTED = 4
_MOST_STALENESS = 12
# Two processes that run the same program differ by up to a tenth. A worker that is named is slower than the others by
# this factor at least, and by this share of a step.
_SLOW_FACTOR, _SLOW_SHARE = 1.2, 0.15
# Intervals are of this many standard deviations. Of so many gradients in a row the first says all. Of who is last, it
# does so for so many seconds: other programs slow a worker down for that long.
_DEVIATIONS, _CORRELATED, _CORRELATED_SECS = 2.5, 5, 0.25
# Of fewer gradients than these nothing is said but their number.
_FEWEST, _SEVERAL = 3, 20
_ENOUGH = 32
# Least shares of a step, and of gradients, that the report names in words.
_MUCH, _SOME_DROPPED = 0.5, 0.05


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median, and the interval in which the true one is.

    Attributes:
      low, high: the limits. Of few values they are the least one and infinity, of twenty of these the 10th percentile
        and infinity, of fewer than three 0 and infinity.
      middle: the median.
      p95: the 95th percentile.
    """

    low: float
    middle: float
    high: float
    p95: float

    @staticmethod
    def of_median(values: Histogram, secs: float = math.inf) -> Interval:
        """Returns the interval between two order statistics, by the binomial distribution; for correlated values.

        Of n independent values, as many are below the median as heads fall in n throws: n/2 +- z sqrt(n)/2. Successive
        gradients of a worker are not independent, so n is a fifth of their number, and at most 4 for each second.

        Args:
          values: the values.
          secs: in how much time they were measured, if that bounds n.
        """
        independent = min(values.count / _CORRELATED, secs / _CORRELATED_SECS)
        around = 50 * _DEVIATIONS / math.sqrt(max(1e-9, independent))
        middle, p95 = values.percentile(50), values.percentile(95)
        if around >= 50:
            # The first gradients of many may be quick, as their batches were read before.
            least = values.percentile(10) if values.count >= _SEVERAL else values.least
            return Interval(least if values.count >= _FEWEST else 0.0, middle, math.inf, p95)
        return Interval(values.percentile(50 - around), middle, values.percentile(50 + around), p95)

    def is_above(self, other: Interval) -> bool:
        """Returns True if this median is above the other; if its values are few, each is above 95 % of the other's."""
        return self.low > (other.high if self.high < math.inf else other.p95)


@dataclasses.dataclass(frozen=True)
class Slow:
    """Workers that are slower than all others.

    Attributes:
      names: the slowest first.
      factor: time of the slowest one over the median of the others.
    """

    names: tuple[str, ...]
    factor: float


def slow_workers(times: Mapping[str, Interval], late: Mapping[str, Interval], step_secs: float = 0.0) -> Slow | None:
    """Returns the workers whose intervals are above those of all others, if they are fewer than the others.

    Args:
      times: by worker, the interval of the median of its own time in a step.
      late: likewise of the time by which it comes after the first one of the same step; what slows all workers is not
        in it. {} where gradients don't wait for each other: then `times` decide.
      step_secs: length of a step, with waits and all-reduces.
    """
    apart = late if late.keys() == times.keys() else times
    ordered = sorted(times, key=lambda name: -times[name].middle)
    for count in range(1, max(2, (len(ordered) + 1) // 2)):
        # A worker with few gradients is named, but says nothing of others.
        slow, others = ordered[:count], [name for name in ordered[count:] if apart[name].high < math.inf]
        if not others:
            return None
        usual = statistics.median(times[name].middle for name in others)
        least = max(_SLOW_FACTOR * usual, usual + _SLOW_SHARE * step_secs)
        is_apart = all(apart[name].is_above(apart[other]) for name in slow for other in others)
        if is_apart and min(times[name].middle for name in slow) >= least:
            return Slow(tuple(slow), times[slow[0]].middle / usual if usual else math.inf)
    return None


class Tally:
    """Adds up updates: all counts and times that a `Report`, the page and TensorBoard have are made here.

    Args:
      num_workers: number of workers.

    Attributes:
      updates, examples: numbers of them.
      counts: int64 [3, workers], number of gradients by `Outcome`.
      staleness: number of accepted gradients by staleness.
      wait_secs, spread_secs: sums over the updates; the spread is from the first to the last accepted gradient.
      held_secs, delay_secs, cost_secs: float64 [workers], see `Report`.
      reduce: the all-reduces.
      times: histograms of each worker whose gradients were timed, by its index and what they are of:
        step: from the start of a gradient's computation to its arrival;
        input: the part of it in which the worker waited for its batch, where that is measured;
        compute: the other part;
        wait: from the arrival of an accepted gradient to that of the last one that the update needs;
        rest: from the end of the last all-reduce to the start, where that is measured;
        own: all that the worker takes itself: rest and step;
        late: from the first arrival of the same step to its own, where that is measured and the update has waited;
        held: how long it was held back before the start.
    """

    def __init__(self, num_workers: int) -> None:
        self.updates = self.examples = 0
        self.counts = np.zeros((len(Outcome), num_workers), np.int64)
        self.staleness: collections.Counter[int] = collections.Counter()
        self.wait_secs = self.spread_secs = 0.0
        self.held_secs, self.delay_secs, self.cost_secs = np.zeros((3, num_workers))
        self.reduce = Histogram()
        self.times: collections.defaultdict[int, collections.defaultdict[str, Histogram]] = collections.defaultdict(
            lambda: collections.defaultdict(Histogram)
        )

    def add(self, updates: Updates, rows: Contributions) -> None:
        """Adds consecutive updates; a gradient whose `start` is NaN was not timed, and counts."""
        if not len(updates):
            return
        num_workers = self.counts.shape[1]
        self.updates += len(updates)
        self.examples += int(updates.examples.sum(dtype=np.int64))
        self.wait_secs += float(updates.wait.sum(dtype=np.float64))
        cell = rows.outcome.astype(np.int64) * num_workers + rows.worker
        self.counts += np.bincount(cell, minlength=self.counts.size).reshape(self.counts.shape)
        staleness = np.bincount(rows.staleness[rows.outcome == Outcome.ACCEPTED])
        self.staleness.update({int(value): int(staleness[value]) for value in np.flatnonzero(staleness)})
        self.reduce.add_all(updates.reduce[updates.reduce > 0])
        update = np.repeat(np.arange(len(updates)), updates.count)
        is_timed = np.isfinite(rows.start)
        if not is_timed.all():
            rows, update = rows[is_timed], update[is_timed]
        self.held_secs += np.bincount(rows.worker, rows.held, num_workers)
        self._add_costs(update, rows)
        self.add_times(updates, rows, update)

    def add_times(self, updates: Updates, rows: Contributions, update: np.ndarray) -> None:
        """Adds the times of gradients alone; `update` has the index of the update of each."""
        reduce = updates.reduce[update].astype(np.float64)
        start, arrival = rows.start.astype(np.float64), rows.arrival.astype(np.float64)
        opened = -updates.opened[update].astype(np.float64)
        is_accepted, is_known = rows.outcome == Outcome.ACCEPTED, rows.outcome != Outcome.LOST
        is_timed = is_known & (reduce > 0)
        is_read = is_timed | (is_known & (rows.input > 0))
        first = np.full(len(updates), np.inf)
        np.minimum.at(first, update, arrival)
        values = {
            "step": (is_known, arrival - start),
            "held": (is_known, rows.held),
            "input": (is_read, rows.input),
            "compute": (is_read, arrival - start - rows.input),
            "rest": (is_timed, start - opened),
            "own": (is_known, arrival - np.where(reduce > 0, opened, start)),
            "late": (is_timed & (updates.wait[update] > 0), arrival - first[update]),
            "wait": (is_accepted, -reduce - arrival),
        }
        worker = rows.worker.astype(np.int64)
        present = np.flatnonzero(np.bincount(worker))
        place = np.searchsorted(present, worker)
        owners = [(place * len(values) + index)[chosen] for index, (chosen, _) in enumerate(values.values())]
        secs = [each[chosen] for chosen, each in values.values()]
        histograms = [self.times[each][kind] for each in present.tolist() for kind in values]
        add_rows(histograms, np.concatenate(owners), np.concatenate(secs))

    def _add_costs(self, update: np.ndarray, rows: Contributions) -> None:
        """Adds what the last gradient of each update cost the others, and the time of gradients that did not count."""
        num_workers, is_accepted = len(self.cost_secs), rows.outcome == Outcome.ACCEPTED
        secs = np.maximum(rows.arrival.astype(np.float64) - rows.start, 0)
        self.cost_secs += np.bincount(rows.worker, np.where(is_accepted, 0, secs), num_workers)
        update, worker, arrival = update[is_accepted], rows.worker[is_accepted], rows.arrival[is_accepted]
        if not len(update):
            return
        order = np.lexsort((arrival, update))
        update, worker, arrival = update[order], worker[order], arrival[order].astype(np.float64)
        is_last = np.append(update[1:] != update[:-1], True)
        is_same = np.concatenate([[False], update[1:] == update[:-1]])
        self.spread_secs += float((arrival[is_last] - arrival[~is_same]).sum())
        gap = np.where(is_same, arrival - np.roll(arrival, 1), 0.0)
        others = np.bincount(update)[update] - 1
        self.delay_secs += np.bincount(worker[is_last], gap[is_last], num_workers)
        self.cost_secs += np.bincount(worker[is_last], (gap * others)[is_last], num_workers)

    def merge(self, other: Tally) -> None:
        """Adds what another one has counted."""
        numbers = "updates", "examples", "counts", "wait_secs", "spread_secs", "held_secs", "delay_secs", "cost_secs"
        for name in numbers:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.staleness.update(other.staleness)
        self.reduce.merge(other.reduce)
        for worker, times in other.times.items():
            for kind, each in times.items():
                self.times[worker][kind].merge(each)

    def report(self, names: Sequence[str]) -> Report:
        """Returns the sums as a `Report`; its bytes are 0."""
        times = {names[worker]: each for worker, each in sorted(self.times.items())}
        kinds = {"step_secs": "step", "input_secs": "input", "compute_secs": "compute", "rest_secs": "rest"}
        kinds |= {"wait": "wait", "held": "held"}
        secs: dict[str, Any] = {
            field: {name: percentiles_of(each[kind]) for name, each in times.items()} for field, kind in kinds.items()
        }
        whole = max((each["own"].total + each["wait"].total for each in times.values()), default=0.0)
        for kind, bound in (("own", math.inf), ("late", whole)):
            secs[f"{kind}_secs"] = {
                name: Interval.of_median(each[kind], bound) for name, each in times.items() if each[kind].count
            }
        fields = "accepted", "dropped", "lost", "held_secs", "delay_secs", "cost_secs"
        values = *self.counts, self.held_secs, self.delay_secs, self.cost_secs
        by_name = {
            field: dict(zip(names, each.tolist(), strict=True)) for field, each in zip(fields, values, strict=True)
        }
        return Report(
            updates=self.updates,
            staleness=dict(sorted(self.staleness.items())),
            wait_secs=self.wait_secs,
            examples=self.examples,
            bytes_sent=dict.fromkeys(names, 0),
            bytes_received=dict.fromkeys(names, 0),
            reduce_secs=percentiles_of(self.reduce),
            **by_name,
            **secs,
        )


def of_log(updates: Updates, contributions: Contributions, names: Sequence[str]) -> Report:
    """Returns the report of consecutive updates of a log; its counts are of these updates."""
    tally = Tally(len(names))
    tally.add(updates, contributions)
    return tally.report(names)


def newest(updates: Updates, contributions: Contributions, most: int) -> tuple[Updates, Contributions]:
    """Returns the newest updates that have so many gradients at most, but one at least, and their gradients."""
    offsets = updates.offsets
    first = min(int(np.searchsorted(offsets[:-1], offsets[-1] - most)), max(0, len(updates) - 1))
    return updates[first:], contributions[int(offsets[first]) :]


def percentiles_of(values: Histogram) -> Percentiles:
    """Returns the percentiles of a histogram."""
    p50, p95, p99 = (values.percentile(percent) for percent in (50, 95, 99))
    return Percentiles(values.count, values.mean, p50, p95, p99, values.most)


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Distribution of some seconds: percentiles within 2 %, mean and maximum exact.

    Attributes:
      count: number of values.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `strategy.report()`, counted since the strategy was built. `print` shows a table.

    Attributes:
      updates: number of updates.
      accepted: number of gradients that entered an update, by worker: {"worker:0": 120, ...}.
      dropped: number of dropped gradients, by worker. Each gradient that was started is accepted, dropped or lost once.
      staleness: number of applied gradients by staleness (global step - local step).
      wait_secs: total time for which updates waited for gradients.
      bytes_sent: bytes that the process of each task has sent over TCP, as the kernel counts them: workers, parameter
        servers and chief. Outside of Linux it is `message_bytes`; 0 for the replicas of one process.
      held_secs: time in which a worker had delivered a gradient and was not allowed to start the next, by worker.
      transfer: form in which variables and gradients cross the network, and why; of ParameterServerStrategy.
      examples: number of examples in the accepted gradients; 0 if unknown.
      bytes_received: likewise bytes received.
      step_secs: time from the start of a gradient's computation to its arrival, by worker, where it was measured.
      wait: time from the arrival of an accepted gradient to that of the last one that its update needs, by worker.
      held: time for which a worker was held back before it started a gradient, by worker.
      lost: number of gradients lost with their worker, by worker.
      losses: number of times that a task was lost, by task; {} if none was.
      returns: number of times that a lost task returned, by task.
      restarts: number of times that a launcher has started this job or a task again, by task.
      phase: "warmup" while fewer than all replicas take part, else "all".
      spares: number of replicas that the current update does not wait for; None without `BackupWorkers`.
      cpu_secs: CPU time of the process of each task, where it is known.
      memory_bytes: resident memory of the process of each task, where it is known.
      message_bytes: bytes of the messages that each worker has sent by `ParameterAveraging` or `Compression`. Headers,
        and all else that the process sends, are not counted. 0 under other policies.
      input_secs: the part of `step_secs` in which a worker waited for its batch, by worker, where workers read.
      compute_secs: the other part, likewise.
      rest_secs: time from the end of an all-reduce to the worker's next call of its data: update, callbacks. Of
        synchronous training without a policy.
      reduce_secs: time from the last gradient to the end of the all-reduce. Likewise.
      own_secs: interval of the median of what a worker takes itself: its rest and its step.
      late_secs: likewise of the time from the first gradient of a step to its own, without a policy.
      delay_secs: time by which updates were later because of a worker: from the last but one gradient to its own.
      cost_secs: worker-seconds that each worker cost the cluster. They are the time in which all others waited for its
        gradient alone, and the time of its gradients that were dropped or lost.
    """

    updates: int
    accepted: dict[str, int]
    dropped: dict[str, int]
    staleness: dict[int, int]
    wait_secs: float
    bytes_sent: dict[str, int]
    held_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    transfer: str = ""
    examples: int = 0
    bytes_received: dict[str, int] = dataclasses.field(default_factory=dict)
    step_secs: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    wait: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    held: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    returns: dict[str, int] = dataclasses.field(default_factory=dict)
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    phase: str = "all"
    spares: int | None = None
    cpu_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    message_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    input_secs: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    compute_secs: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    rest_secs: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    reduce_secs: Percentiles = Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    own_secs: dict[str, Interval] = dataclasses.field(default_factory=dict)
    late_secs: dict[str, Interval] = dataclasses.field(default_factory=dict)
    delay_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    cost_secs: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def slow(self) -> Slow | None:
        """The workers that are slower than all others, if there are any."""
        return slow_workers(self.own_secs, self.late_secs, self._mean_step())

    def _mean_step(self) -> float:
        kinds = (self.rest_secs, self.step_secs, self.wait)
        means = [sum(each.mean for each in kind.values()) / max(1, len(kind)) for kind in kinds]
        return sum(means) + self.reduce_secs.mean

    @property
    def order(self) -> list[str]:
        """Names of the workers: the slow ones first, then by what they cost."""
        slow, names = self.slow, list(self.accepted)
        first = {name: place for place, name in enumerate(slow.names if slow else ())}

        def key(name: str) -> tuple[float, ...]:
            step = self.step_secs.get(name)
            cost, dropped = self.cost_secs.get(name, 0.0), self.dropped.get(name, 0)
            return first.get(name, len(first)), -round(cost, 3), -dropped, -(step.p50 if step else 0.0)

        return sorted(names, key=key)

    @property
    def in_words(self) -> str:
        """One line: who is slow, and why; "" where nothing was measured."""
        if not self.own_secs:
            return ""
        slow, shares = self.slow, self._shares()
        if slow is None:
            text = (self._few() or "no worker stands out") if len(self.accepted) > 1 else ""
            of_all = [f"{_percent(share)} of a step is {what}" for what, share in shares.items() if share >= _MUCH]
            return "; ".join(each for each in (text, *of_all) if each)
        names = " and ".join(slow.names) if len(slow.names) < 3 else f"{slow.names[0]} and {len(slow.names) - 1} others"
        are = "are" if len(slow.names) > 1 else "is"
        factor = f"{slow.factor:.1f}" if slow.factor < 9.95 else f"{slow.factor:.0f}"
        return f"{names} {are} {factor} times as slow as the median{self._why(slow)}"

    def _few(self) -> str:
        """Returns a line on a worker that has sent hardly a gradient, and was not lost; "" if there is none."""
        sent = {name: count + self.dropped.get(name, 0) for name, count in self.accepted.items()}
        usual = int(statistics.median(sent.values()))
        name = min(sent, key=lambda name: sent[name])
        if sent[name] >= _FEWEST or self.lost.get(name) or usual < _ENOUGH:
            return ""
        return f"{name} has sent {sent[name]} gradient{'' if sent[name] == 1 else 's'}, the others {usual} (median)"

    def _shares(self) -> dict[str, float]:
        """Returns which shares of the mean step the input and the all-reduce take, where they are measured."""
        step = self._mean_step()
        if not self.reduce_secs.count or not step:
            return {}
        read = sum(each.mean for each in self.input_secs.values()) / len(self.input_secs)
        return {"input": read / step, "the all-reduce": self.reduce_secs.mean / step}

    def _why(self, slow: Slow) -> str:
        name = slow.names[0]
        dropped, accepted = self.dropped.get(name, 0), self.accepted.get(name, 0)
        texts = []
        if dropped > _SOME_DROPPED * (accepted + dropped):
            texts.append(f"{_percent(dropped / (accepted + dropped))} of its gradients are dropped")
        kinds = {"input": self.input_secs, "computing": self.compute_secs, "callbacks and updates": self.rest_secs}
        others = [each for each in self.own_secs if each not in slow.names]
        more = {}
        for kind, times in kinds.items():
            usual = [times[each].p50 for each in others if each in times and times[each].count]
            if name in times and times[name].count and usual:
                more[kind] = times[name].p50 - statistics.median(usual)
        if more:
            kind = max(more, key=lambda kind: more[kind])
            # Percentiles are within 2 %, and each part is less than the whole.
            share = min(0.99, kinds[kind][name].p50 / max(self.own_secs[name].middle, 1e-9))
            texts.insert(0, f"{_percent(share)} of its time is {kind}")
        return f": {', '.join(texts)}" if texts else ""

    def __str__(self) -> str:
        lines = [self._first(), *([self.in_words] if self.in_words else [])]
        if self.accepted:
            lines += _table(self._gradient_rows())
        if self.reduce_secs.count:
            lines.append(f"all-reduce, ms p50/p95: {_milliseconds(self.reduce_secs)}")
        if self.staleness:
            counts = [f"{staleness}: {count}" for staleness, count in sorted(self.staleness.items())]
            more = f", ... up to {max(self.staleness)}" if len(counts) > _MOST_STALENESS else ""
            lines.append("gradients by staleness: " + ", ".join(counts[:_MOST_STALENESS]) + more)
        if any(self.held_secs.values()):
            lines.append(
                "idle between gradients: " + _listed({name: f"{secs:.2f} s" for name, secs in self.held_secs.items()})
            )
        lines += self._tasks()
        kinds = {"lost": self.losses, "back": self.returns, "restarted": self.restarts}
        if any(kinds.values()):
            shown = {
                what: _listed({name: f"{count} x" for name, count in each.items()}, _MOST_LISTED)
                for what, each in kinds.items()
            }
            lines.append("; ".join(f"{what}: {text}" for what, text in shown.items() if text))
        if self.transfer:
            lines.append(f"transfer: {self.transfer}")
        return "\n".join(lines)

    def _first(self) -> str:
        each = f" ({self.wait_secs / self.updates:.4f} s each)" if self.updates else ""
        examples = f", {self.examples:,} examples" if self.examples else ""
        spares = "" if self.spares is None else f", spares: {self.spares}"
        phase = "" if self.phase == "all" else f", phase: {self.phase}"
        return f"{self.updates} updates, waited {self.wait_secs:.2f} s for gradients{each}{examples}{spares}{phase}"

    def worker_rows(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the table of these workers as text: the header, and a row for each."""
        rows = [["worker", "accepted", "of updates", "dropped", "of its gradients"]]
        kinds = {"step, ms p50/p95": self.step_secs}
        if any(each.count for each in self.input_secs.values()):
            kinds = {"input, ms p50/p95": self.input_secs, "compute, ms": self.compute_secs, "rest, ms": self.rest_secs}
        kinds |= {"wait, ms": self.wait, "idle, ms": self.held}
        kinds = {name: found for name, found in kinds.items() if any(each.most for each in found.values())}
        rows[0] += [*kinds, *(["lost"] if any(self.lost.values()) else [])]
        for name in names:
            accepted, dropped = self.accepted[name], self.dropped.get(name, 0)
            row = [name, f"{accepted}", _share(accepted, self.updates), f"{dropped}"]
            row.append(_share(dropped, accepted + dropped))
            row += [_milliseconds(found.get(name)) for found in kinds.values()]
            rows.append(row + ([f"{self.lost[name]}"] if any(self.lost.values()) else []))
        return rows

    def _gradient_rows(self) -> list[list[str]]:
        names = list(self.accepted)
        # Of many, those that cost most.
        shown = names if len(names) <= _MOST_ROWS else self.order[: _MOST_ROWS - 1]
        rows = self.worker_rows(shown)
        if len(names) > len(shown):
            accepted, dropped = sum(self.accepted.values()), sum(self.dropped.values())
            total = [f"all {len(names)}", f"{accepted}", "", f"{dropped}", _share(dropped, accepted + dropped)]
            rows.append(total + [""] * (len(rows[0]) - len(total)))
        return rows

    def _tasks(self) -> list[str]:
        if not any(self.bytes_received.values()) and not self.memory_bytes:
            counts = {name: f"{count:,}" for name, count in self.bytes_sent.items()}
            return ["bytes sent: " + _listed(counts)] if any(self.bytes_sent.values()) else []
        names = [
            name
            for name in dict.fromkeys([*self.bytes_sent, *self.memory_bytes])
            if name in self.memory_bytes or self.bytes_sent.get(name) or self.bytes_received.get(name)
        ]
        rows = [["task", "bytes sent", "received", "cpu, s", "memory, MB"]]
        for name in names if len(names) <= _MOST_ROWS else names[: _MOST_ROWS - 1]:
            memory = self.memory_bytes.get(name)
            row = [name, f"{self.bytes_sent.get(name, 0):,}", f"{self.bytes_received.get(name, 0):,}"]
            row += [f"{self.cpu_secs[name]:.1f}" if name in self.cpu_secs else "-"]
            rows.append([*row, f"{memory / 1e6:.0f}" if memory else "-"])
        if len(names) > _MOST_ROWS:
            sums = [f"{sum(counts.values()):,}" for counts in (self.bytes_sent, self.bytes_received)]
            memory = f"{sum(self.memory_bytes.values()) / 1e6:.0f}"
            rows.append([f"all {len(names)}", *sums, f"{sum(self.cpu_secs.values()):.1f}", memory])
        return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column is aligned at the left, the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'>' if index else '<'}{width}" for index, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def _listed(texts: dict[str, str], most: int = _MOST_ROWS) -> str:
    most = most if len(texts) <= most else _MOST_LISTED
    shown = [f"{name}: {text}" for name, text in list(texts.items())[:most]]
    return ", ".join(shown) + (f", and {len(texts) - len(shown)} more" if len(texts) > len(shown) else "")


def _milliseconds(found: Percentiles | None) -> str:
    return f"{1e3 * found.p50:.1f}/{1e3 * found.p95:.1f}" if found and found.count else "-"


def _percent(share: float) -> str:
    # Not 100 % of what has a rest.
    return f"{math.floor(100 * share) if share < 1 else 100} %"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def with_usage(report: Report, usage: dict[str, Any], sent: dict[str, int]) -> Report:
    """Returns a report with the counters of the tasks' processes.

    Args:
      report: the report.
      usage: `coordination.usage.Usage` of each task whose process is known.
      sent: bytes that tfdist has counted itself, for tasks whose kernel counts none.
    """
    zeros = dict.fromkeys(report.bytes_sent, 0)
    counted = {name: usage[name].bytes_sent for name in usage if usage[name].bytes_sent or not sent.get(name)}
    return dataclasses.replace(
        report,
        bytes_sent=zeros | sent | counted,
        bytes_received=zeros | {name: each.bytes_received for name, each in usage.items()},
        cpu_secs={name: each.cpu_secs for name, each in usage.items()},
        memory_bytes={name: each.memory_bytes for name, each in usage.items()},
        message_bytes={name: sent.get(name, 0) for name in report.bytes_sent},
    )
