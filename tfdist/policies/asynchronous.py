# SPDX-License-Identifier: Apache-2.0
"""Asynchronous aggregation: SoftSync, StalenessScaling, DropStale and BoundedStaleness combined in one policy."""

from __future__ import annotations

import collections
import heapq

from tfdist.policies import base
from tfdist.policies.records import Delivered, Outcome
from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling


class Asynchronous(base.Aggregation):
    """Makes each update from any S gradients, the oldest first. A worker continues as soon as it delivered a gradient.

    While S gradients wait, a worker whose gradient is among them starts its next one after their update, so that it
    reads what it has changed. Others start at once: workers that were held up together would start, and arrive,
    together for ever. Only with a bound does everybody wait for such updates, because an older step has an earlier
    deadline.

    With a bound s, a gradient of local step L must be applied at step L + s at the latest: its deadline. Gradients in
    flight are those that are computed or wait. All can meet their deadlines if and only if, for each d, at most (d -
    step + 1) * S have a deadline of at most d. That follows because each update takes the S oldest gradients, and
    earliest deadline first is optimal. A worker may start, and an update may be made, only if the condition still holds
    afterwards. This can't deadlock: once all gradients in flight have arrived, the S oldest may always be applied.

    Args:
      soft_sync: sets S; 1 if None.
      scaling: sets the weight of a gradient; 1.0 if None.
      drop: sets the staleness above which gradients are dropped; no gradient is dropped if None.
      bounded: sets s; no bound if None.
    """

    def __init__(
        self,
        soft_sync: SoftSync | None = None,
        scaling: StalenessScaling | None = None,
        drop: DropStale | None = None,
        bounded: BoundedStaleness | None = None,
    ) -> None:
        super().__init__()
        self._updates = soft_sync.updates if soft_sync else 1
        self._scaling = scaling
        self._max_staleness = drop.max_staleness if drop else None
        self._bound = bounded.bound if bounded else None
        # A heap.
        self._pending: list[Delivered] = []
        # Local step -> number of gradients in flight, by ascending local step. Kept with a bound only.
        self._in_flight: dict[int, int] = {}

    def __repr__(self) -> str:
        return (
            f"Asynchronous(updates={self._updates}, scaling={self._scaling!r}, max_staleness={self._max_staleness}, "
            f"bound={self._bound})"
        )

    @property
    def is_synchronous(self) -> bool:
        """False: replicas start their next gradient without waiting for Keras."""
        return False

    @property
    def is_weighted(self) -> bool:
        """True if a `StalenessScaling` sets the weights."""
        return self._scaling is not None

    @property
    def replicas_to_aggregate(self) -> int:
        """S, the number of gradients in an update."""
        return self._updates

    @property
    def update_due(self) -> bool:
        """True if S gradients wait, and all other gradients in flight could still meet the bound after their update."""
        return self._total > 0 and len(self._pending) >= self._updates and self._leaves_time()

    @property
    def contributors(self) -> tuple[int, ...]:
        """Replicas of the waiting gradients, the oldest gradient first. A replica may appear several times."""
        return tuple(pending.replica for pending in sorted(self._pending))

    @property
    def waiting(self) -> tuple[int, ...]:
        """`Arrival.number` of each waiting gradient, the oldest first."""
        return tuple(pending.number for pending in sorted(self._pending))

    def is_busy(self, replica: int) -> bool:
        """Returns True if `replica` computes a gradient."""
        return replica in self._computing

    @property
    def may_any_start(self) -> bool:
        """True if a new gradient could be applied within the bound, and with a bound no update can be made."""
        if self._bound is None:
            return True
        under_way = len(self._computing) + len(self._pending)
        return len(self._pending) < self._updates and under_way < (self._bound + 1) * self._updates

    def start(self, replica: int, time: float) -> int | None:
        """See `Aggregation.start`."""
        local_step = None if self._awaited(replica) else super().start(replica, time)
        if self._bound is not None and local_step is not None:
            self._in_flight[local_step] = self._in_flight.get(local_step, 0) + 1
        return local_step

    def is_wanted(self, replica: int, local_step: int) -> bool:
        """Returns False if a computed gradient would be dropped, so that it need not be sent."""
        return self.is_computing(replica, local_step) and not self._is_too_old(local_step)

    def arrived(
        self, replica: int, local_step: int, time: float, input_secs: float = 0.0, start: float | None = None
    ) -> base.Arrival:
        """Queues the gradient of `replica` for an update, or drops it if it is too old already.

        The answer has the staleness at arrival. The weight depends on the staleness when the gradient is applied. See
        `Aggregation.arrived` for the arguments.
        """
        # Before: a gradient that is computed may hold an update back, which is due when the gradient arrives.
        was_due = self.update_due
        staleness = self._step - local_step
        computation = self._end_computing(replica, local_step, time, input_secs, start)
        if computation is None or self._is_too_old(local_step):
            if computation is not None:
                self._landed(local_step)
            self._drop(computation, time)
            return base.Arrival(False, staleness, 0.0)
        heapq.heappush(self._pending, Delivered(local_step, self._number, computation, time))
        self._number += 1
        if self.update_due and not was_due:
            self._due_at = time
        return base.Arrival(True, staleness, 1.0, self._number - 1)

    def updated(self, time: float, *, with_fewer: bool = False) -> base.Update:
        """Notes that the update that was due has been made, and increments the global step.

        Args:
          time: time of the update.
          with_fewer: True if the update was made of fewer than S gradients, because the data have ended.

        Raises:
          RuntimeError: no update was due.
          ValueError: the user's rule returned an invalid weight.
        """
        count = min(len(self._pending), self._updates)
        if not count or not (self.update_due or with_fewer):
            raise RuntimeError(f"no update was due in step {self._step}: {count} of {self._updates} gradients")
        # An error of the user's rule leaves the gradients where they are.
        chosen = heapq.nsmallest(count, self._pending)
        weights = [self._scaling.weight(self._step - each.local_step) if self._scaling else 1.0 for each in chosen]
        accepted = [
            each.ended(self._step, Outcome.ACCEPTED, weight) for each, weight in zip(chosen, weights, strict=True)
        ]
        for pending in chosen:
            heapq.heappop(self._pending)
            self._landed(pending.local_step)
        update = self._stepped_with(time, accepted, numbers=[pending.number for pending in chosen])
        if self.update_due:
            self._due_at = time
        return update

    def missing(self) -> tuple[int, ...]:
        """Returns the lost replicas if no replica is alive, else ()."""
        return () if self.alive() else tuple(sorted(self._lost))

    def discard(self) -> None:
        """Drops all waiting gradients."""
        self._drop_all(self._pending)
        self._pending = []

    def stepped(self) -> None:
        """See `Aggregation.stepped`."""
        too_old = []
        while self._pending and self._is_too_old(self._pending[0].local_step):
            too_old.append(heapq.heappop(self._pending))
        self._drop_all(too_old)

    def _drop_all(self, gradients: list[Delivered]) -> None:
        for pending in sorted(gradients, key=lambda pending: pending.number):
            self._drop(pending.computation, pending.time)
            self._landed(pending.local_step)

    def _withdraw(self, replica: int, time: float, outcome: Outcome | None) -> None:
        # Delivered gradients stay: the parameter servers hold them, so that the loss of a worker doesn't matter.
        if computation := self._stop(replica, time, outcome):
            self._landed(computation.local_step)

    def _hindrance(self, replica: int) -> str:
        return super()._hindrance(replica) or self._awaited(replica)

    def _awaited(self, replica: int) -> str:
        """Returns what an idle replica waits for, as `_hindrance` does."""
        if not self.may_any_start:
            return "waits for updates, so that the bound holds"
        # Of the updates that can be made.
        chosen = heapq.nsmallest(len(self._pending) // self._updates * self._updates, self._pending)
        return "waits for an update" if any(pending.replica == replica for pending in chosen) else ""

    def _landed(self, local_step: int) -> None:
        """Notes that a gradient is in flight no more."""
        if self._bound is None:
            return
        self._in_flight[local_step] -= 1
        if not self._in_flight[local_step]:
            del self._in_flight[local_step]

    def _is_too_old(self, local_step: int) -> bool:
        return self._max_staleness is not None and self._step - local_step > self._max_staleness

    def _leaves_time(self) -> bool:
        """Returns True if all other gradients in flight can still meet the bound after an update of the S oldest."""
        if self._bound is None:
            return True
        chosen = collections.Counter(pending.local_step for pending in heapq.nsmallest(self._updates, self._pending))
        left = len(self._computing) + len(self._pending) - self._updates
        no_later = 0
        for local_step, count in self._in_flight.items():
            updates_left = local_step + self._bound - self._step
            if updates_left * self._updates >= left:
                # Also for all later local steps.
                return True
            no_later += count - chosen[local_step]
            if count > chosen[local_step] and no_later > updates_left * self._updates:
                return False
        return True
