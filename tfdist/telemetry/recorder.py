# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: counts and histograms of updates, for `strategy.report()` and the Telemetry callback. No TensorFlow."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.policies.records import Contribution, Outcome, Update
from tfdist.telemetry import report
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.report import Report, Times
from tfdist.telemetry.update_log import Contributions, Updates

# Called with an update, its number of examples, and the number of updates so far.
Sink = Callable[[Update, int, int], None]
# Called with synchronous steps, and the number of updates so far.
StepSink = Callable[[Updates, Contributions, int], None]
# Called with the index of a replica, and True if it was lost, False if it is back.
LossSink = Callable[[int, bool], None]
# So many updates are added to the sums at once; of synchronous steps, which are columns, more.
_MOST_PENDING = 64
_MOST_PENDING_STEPS = 2048


@dataclasses.dataclass(frozen=True)
class RecorderSums:
    """Sums of a `Recorder` at one time. The difference of two gives the sums of an interval.

    Attributes:
      updates: number of updates.
      examples: number of examples in the accepted gradients; 0 if unknown.
      accepted: number of gradients that entered an update, by replica.
      dropped: number of dropped gradients, by replica.
      wait_secs: sum of the updates' `wait_secs`.
      spread_secs: sum of the times from the first to the last gradient of an update.
      lost: number of gradients lost with their replica, by replica.
      staleness: sum of the staleness of the accepted gradients.
      reduce_secs: sum of the times of the steps' all-reduces.
    """

    updates: int
    examples: int
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    wait_secs: float
    spread_secs: float
    lost: tuple[int, ...] = ()
    staleness: int = 0
    reduce_secs: float = 0.0

    def since(self, before: RecorderSums) -> RecorderSums:
        """Returns the difference between these sums and those of `before`."""

        def less(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a - b for a, b in zip(now, then, strict=True))

        return RecorderSums(
            updates=self.updates - before.updates,
            examples=self.examples - before.examples,
            accepted=less(self.accepted, before.accepted),
            dropped=less(self.dropped, before.dropped),
            wait_secs=self.wait_secs - before.wait_secs,
            spread_secs=self.spread_secs - before.spread_secs,
            lost=less(self.lost, before.lost),
            staleness=self.staleness - before.staleness,
            reduce_secs=self.reduce_secs - before.reduce_secs,
        )


class Recorder:
    """Adds up the statistics of updates; any thread may call it.

    Args:
      names: names of the replicas in reports, such as "worker:0".
      is_complete: see the attribute.

    Attributes:
      names: names of the replicas in reports.
      is_complete: True if each update is recorded when it is made. With averages alone, where each batch is an
        update, those since the last average are recorded with the next one.
      sink: receives each update, under the recorder's lock; None to drop them.
      step_sink: likewise receives synchronous steps.
      loss_sink: receives losses and returns of replicas.
      has_steps: True if steps were added that no policy has decided about.
    """

    def __init__(self, names: Sequence[str], is_complete: bool = False) -> None:
        self.names = tuple(names)
        self.is_complete = is_complete
        self.sink: Sink | None = None
        self.step_sink: StepSink | None = None
        self.loss_sink: LossSink | None = None
        self.has_steps = False
        self._lock = threading.RLock()
        self._updates = 0
        self._examples = 0
        self._accepted = [0] * len(self.names)
        self._dropped = [0] * len(self.names)
        self._lost = [0] * len(self.names)
        self._staleness: collections.Counter[int] = collections.Counter()
        self._held_secs = [0.0] * len(self.names)
        self._wait_secs = 0.0
        self._spread_secs = 0.0
        self._staleness_sum = 0
        # Of all time but the last interval, and of that.
        self._before: dict[int, Times] = {}
        self._times: dict[int, Times] = {}
        self._losses = [0] * len(self.names)
        self._returns = [0] * len(self.names)
        self._reduce = Histogram()
        self._delay_secs = [0.0] * len(self.names)
        self._cost_secs = [0.0] * len(self.names)
        # Updates and synchronous steps that are counted, and not yet in the other sums.
        self._pending: list[Update] = []
        self._pending_steps: list[tuple[Updates, Contributions]] = []

    def record(self, update: Update, examples: int = 0) -> None:
        """Adds an update.

        Args:
          update: the policy's result.
          examples: number of examples in its gradients; 0 if unknown.
        """
        with self._lock:
            self._updates += 1
            self._examples += examples
            self._pending.append(update)
            if len(self._pending) >= _MOST_PENDING:
                self._add_pending()
            if self.sink is not None:
                self.sink(update, examples, self._updates)

    def _add_pending(self) -> None:
        """Adds the last updates to the sums: many at once, which takes a part of the time."""
        self._add_pending_steps()
        pending, self._pending = self._pending, []
        rows: dict[int, list[tuple[Contribution, float]]] = {}
        for update in pending:
            accepted, ended = update.contributors, update.contributions
            for replica in accepted:
                self._accepted[replica] += 1
            for replica in update.dropped:
                self._dropped[replica] += 1
            for replica, secs in enumerate(update.held_secs):
                self._held_secs[replica] += secs
            self._staleness.update(update.staleness)
            self._staleness_sum += sum(update.staleness)
            self._wait_secs += update.wait_secs
            self._spread_secs += update.spread_secs
            for gradient in ended:
                rows.setdefault(gradient.replica, []).append((gradient, update.time))
                if gradient.outcome is not Outcome.ACCEPTED:
                    self._lost[gradient.replica] += gradient.outcome is Outcome.LOST
                    self._cost_secs[gradient.replica] += max(0.0, gradient.arrival - gradient.start)
            # The accepted ones are last, in the order of their arrival: others have waited for the last one.
            if len(accepted) > 1 and len(ended) > 1:
                late = max(0.0, ended[-1].arrival - ended[-2].arrival)
                self._delay_secs[ended[-1].replica] += late
                self._cost_secs[ended[-1].replica] += late * (len(accepted) - 1)
        for replica, given in rows.items():
            self._times_of(replica).add_all(given)

    def _times_of(self, replica: int) -> Times:
        if replica not in self._times:
            self._times[replica] = Times()
        return self._times[replica]

    def record_steps(self, updates: Updates, rows: Contributions) -> None:
        """Adds synchronous steps, each with a gradient of every replica."""
        if not len(updates):
            return
        with self._lock:
            self.add_untimed(len(updates))
            self._pending_steps.append((updates, rows))
            if sum(len(each) for each, _ in self._pending_steps) >= _MOST_PENDING_STEPS:
                self._add_pending_steps()
            if self.step_sink is not None:
                self.step_sink(updates, rows, self._updates)

    def _add_pending_steps(self) -> None:
        """Adds the last steps to the sums: one that is never asked, as on most workers, does so rarely."""
        if not self._pending_steps:
            return
        pending, self._pending_steps = self._pending_steps, []
        updates = Updates.concatenated([each for each, _ in pending])
        rows = Contributions.concatenated([each for _, each in pending])
        self._wait_secs += float(updates.wait.sum(dtype=np.float64))
        arrivals = rows.arrival.reshape(len(updates), -1)
        self._spread_secs += float(np.ptp(arrivals, 1).sum(dtype=np.float64))
        report.add_times(self._times, updates, rows)
        self._reduce.add_all(updates.reduce)
        delays, costs = report.costs_of(updates, rows, len(self.names))
        self._delay_secs = [*map(float.__add__, self._delay_secs, delays.tolist())]
        self._cost_secs = [*map(float.__add__, self._cost_secs, costs.tolist())]

    def add_untimed(self, updates: int) -> None:
        """Adds updates of all replicas' gradients whose times are not known."""
        with self._lock:
            self._updates += updates
            self._accepted = [count + updates for count in self._accepted]
            self._staleness[0] += updates * len(self.names)
            self._staleness = +self._staleness

    def add_step(self, contributions: Sequence[Contribution], time: float) -> None:
        """Adds the times of a step of Keras' loop, where no policy decides; it is counted in no sum."""
        with self._lock:
            self.has_steps = True
            for gradient in contributions:
                self._times_of(gradient.replica).add_all([(gradient, time)])
                self._lost[gradient.replica] += gradient.outcome is Outcome.LOST

    def changed(self, replica: int, is_lost: bool) -> None:
        """Counts the loss of a replica, or its return."""
        with self._lock:
            (self._losses if is_lost else self._returns)[replica] += 1
            if self.loss_sink is not None:
                self.loss_sink(replica, is_lost)

    @property
    def updates(self) -> int:
        """Number of updates so far."""
        with self._lock:
            return self._updates

    def sums(self) -> RecorderSums:
        """Returns the sums so far."""
        with self._lock:
            self._add_pending()
            return RecorderSums(
                updates=self._updates,
                examples=self._examples,
                accepted=tuple(self._accepted),
                dropped=tuple(self._dropped),
                wait_secs=self._wait_secs,
                spread_secs=self._spread_secs,
                lost=tuple(self._lost),
                staleness=self._staleness_sum,
                reduce_secs=self._reduce.total,
            )

    def take_times(self) -> dict[int, Times]:
        """Returns the histograms of the replicas since the last call, and begins new ones."""
        with self._lock:
            self._add_pending()
            taken, self._times = self._times, {}
            for replica, times in taken.items():
                self._before.setdefault(replica, Times()).merge(times)
            return taken

    def report(self) -> Report:
        """Returns the sums as a `Report`, with the replicas' names."""
        with self._lock:
            self._add_pending()
            times = self._all_times()
            return Report(
                updates=self._updates,
                accepted=self._named(self._accepted),
                dropped=self._named(self._dropped),
                staleness=dict(sorted(self._staleness.items())),
                wait_secs=self._wait_secs,
                bytes_sent=dict.fromkeys(self.names, 0),
                held_secs=dict(zip(self.names, self._held_secs, strict=True)),
                examples=self._examples,
                bytes_received=dict.fromkeys(self.names, 0),
                **report.columns(times),
                reduce_secs=report.percentiles_of(self._reduce),
                delay_secs=dict(zip(self.names, self._delay_secs, strict=True)),
                cost_secs=dict(zip(self.names, self._cost_secs, strict=True)),
                lost=self._named(self._lost),
                losses={name: count for name, count in self._named(self._losses).items() if count},
                returns={name: count for name, count in self._named(self._returns).items() if count},
            )

    def _all_times(self) -> dict[str, Times]:
        whole: dict[str, Times] = {}
        for replica in sorted(self._before.keys() | self._times.keys()):
            times = whole[self.names[replica]] = Times()
            for part in (self._before, self._times):
                if replica in part:
                    times.merge(part[replica])
        return whole

    def _named(self, counts: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.names, counts, strict=True))
