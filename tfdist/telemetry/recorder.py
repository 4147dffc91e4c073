# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: counts and times of updates, for `strategy.report()`, the Telemetry callback and the update log.

An engine hands over `Update`s, or columns of synchronous steps. Both become columns, which are added up and given to
the update log. No TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.policies.records import Contribution, Outcome, Update
from tfdist.telemetry.report import Report, Tally
from tfdist.telemetry.update_log import Contributions, EventKind, UpdateRecord, Updates
from tfdist.telemetry.update_log.columns import of_records

# Called with consecutive updates, on the clock of the engine; `step` is the number of updates so far.
Sink = Callable[[Updates, Contributions], None]
# Called with the kind of an event, a line for people, and the index of a replica, or -1.
OnEvent = Callable[[EventKind, str, int], None]
# So many updates become columns at once, which takes a part of the time.
_MOST_PENDING = 64
# So many rows are added to the sums at once: where nobody asks for them, as on most workers, that is rare.
_MOST_ROWS = 16_384


class Recorder:
    """Adds up the statistics of updates; any thread may call it.

    Args:
      names: names of the replicas in reports, such as "worker:0".
      is_complete: see the attribute.

    Attributes:
      names: names of the replicas in reports.
      is_complete: True if each update is recorded when it is made. With averages alone, where each batch is an
        update, those since the last average are recorded with the next one.
      is_warming: returns True during a warmup phase; None if there is none.
      sink: receives timed updates, under the recorder's lock; None to drop them.
      on_event: receives changes of the policy, losses and returns of replicas, likewise.
      has_steps: True if steps were added that no policy has decided about.
    """

    def __init__(self, names: Sequence[str], is_complete: bool = False) -> None:
        self.names = tuple(names)
        self.is_complete = is_complete
        self.is_warming: Callable[[], bool] | None = None
        self.sink: Sink | None = None
        self.on_event: OnEvent | None = None
        self.has_steps = False
        self._lock = threading.RLock()
        self._updates = 0
        # Of all time but the last interval, and of that.
        self._before, self._tally = Tally(len(self.names)), Tally(len(self.names))
        self._losses, self._returns = [0] * len(self.names), [0] * len(self.names)
        # Updates and columns that are counted in `_updates`, and not yet in the tally.
        self._records: list[tuple[Update, int, int]] = []
        self._columns: list[tuple[Updates, Contributions]] = []
        self._num_rows = 0

    def record(self, update: Update, examples: int = 0) -> None:
        """Adds an update.

        Args:
          update: the policy's result. One without a `time` was not timed.
          examples: number of examples in its gradients; 0 if unknown.
        """
        with self._lock:
            self._updates += 1
            # Of the phase, only the time now is right.
            self._records.append((update, examples, int(self.is_warming is not None and self.is_warming())))
            if len(self._records) >= _MOST_PENDING:
                self.flush()
            if self.on_event is not None:
                for change in update.changes:
                    self.on_event(EventKind.POLICY_CHANGED, change.text, -1)

    def record_steps(self, updates: Updates, rows: Contributions) -> None:
        """Adds synchronous steps, each with a gradient of every replica."""
        if not len(updates):
            return
        with self._lock:
            self.flush()
            self._updates += len(updates)
            phase = np.full(len(updates), self.is_warming is not None and self.is_warming())
            self._add(updates.replace(step=self._updates + 1 - np.arange(len(updates), 0, -1), phase=phase), rows, True)

    def add_untimed(self, updates: int) -> None:
        """Adds updates of all replicas' gradients whose times are not known."""
        with self._lock:
            self._updates += updates
            self._tally.updates += updates
            self._tally.counts[Outcome.ACCEPTED] += updates
            self._tally.staleness.update({0: updates * len(self.names)} if updates else {})

    def add_times(self, updates: Updates, rows: Contributions) -> None:
        """Adds the times of steps of Keras' loop, which the engine counts."""
        with self._lock:
            self.has_steps = True
            self._tally.add_times(updates, rows, np.repeat(np.arange(len(updates)), updates.count))

    def changed(self, replica: int, is_lost: bool) -> None:
        """Counts the loss of a replica, or its return."""
        with self._lock:
            (self._losses if is_lost else self._returns)[replica] += 1
            if self.on_event is not None:
                kind = EventKind.LOST if is_lost else EventKind.RETURNED
                self.on_event(kind, "takes no part any more" if is_lost else "takes part again", replica)

    def flush(self) -> None:
        """Gives the sink what it has not received yet."""
        with self._lock:
            records, self._records = self._records, []
            # The engine of a warmup phase doesn't time its updates; the callback times them, by Keras' steps.
            untimed, timed = list[UpdateRecord](), list[UpdateRecord]()
            for number, (made, examples, phase) in enumerate(records, self._updates - len(records) + 1):
                is_complete = len(made.contributions) >= len(made.contributors) + len(made.dropped)
                rows = made.contributions if is_complete else _rows(made)
                facts = number, made.time, made.opened_secs, made.wait_secs, examples, phase, rows
                (timed if made.time else untimed).append(UpdateRecord(*facts))
            for found in (untimed, timed):
                if found:
                    self._add(*of_records(found), found is timed)

    def _add(self, updates: Updates, rows: Contributions, is_timed: bool) -> None:
        self._columns.append((updates, rows))
        self._num_rows += len(rows) + len(updates)
        if self._num_rows >= _MOST_ROWS:
            self._tally_columns()
        if is_timed and self.sink is not None:
            self.sink(updates, rows)

    def _tally_columns(self) -> None:
        columns, self._columns, self._num_rows = self._columns, [], 0
        updates = Updates.concatenated([each for each, _ in columns])
        self._tally.add(updates, Contributions.concatenated([each for _, each in columns]))

    @property
    def updates(self) -> int:
        """Number of updates so far."""
        with self._lock:
            return self._updates

    def take(self) -> Tally:
        """Returns the sums since the last call, and begins new ones."""
        with self._lock:
            self.flush()
            self._tally_columns()
            taken, self._tally = self._tally, Tally(len(self.names))
            self._before.merge(taken)
            return taken

    def report(self) -> Report:
        """Returns the sums as a `Report`, with the replicas' names."""
        with self._lock:
            self.flush()
            self._tally_columns()
            whole = Tally(len(self.names))
            whole.merge(self._before)
            whole.merge(self._tally)
            losses, returns = (
                {name: count for name, count in zip(self.names, counts, strict=True) if count}
                for counts in (self._losses, self._returns)
            )
            return dataclasses.replace(whole.report(self.names), losses=losses, returns=returns)


def _rows(update: Update) -> Sequence[Contribution]:
    """Returns the gradients of an update, of which some are known by their outcome alone."""
    missing = collections.Counter((replica, Outcome.ACCEPTED) for replica in update.contributors)
    missing.update((replica, Outcome.DROPPED) for replica in update.dropped)
    missing.subtract((each.replica, each.outcome) for each in update.contributions)
    unknown = [Contribution(replica, math.nan, math.nan, outcome) for replica, outcome in missing.elements()]
    return [*update.contributions, *unknown]
