# SPDX-License-Identifier: Apache-2.0
"""Asynchronous aggregation: SoftSync, StalenessScaling, DropStale and BoundedStaleness combined in one policy."""

from __future__ import annotations

import dataclasses

from tfdist.policies import base
from tfdist.policies.staleness import BoundedStaleness, DropStale, SoftSync, StalenessScaling


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A gradient that waits for its update."""

    number: int
    replica: int
    local_step: int
    time: float


class Asynchronous(base.Aggregation):
    """Makes each update from any S gradients, the oldest first. A worker continues as soon as it delivered a gradient.

    A worker starts no gradient while S gradients wait: their update is made first, so that the worker reads newer
    variables.

    With a bound s, a gradient of local step L must be applied at step L + s at the latest: its deadline. All gradients
    in flight (computing or waiting) can meet their deadlines if and only if, for each d, no more than
    (d - step + 1) * S of them have a deadline of at most d. That follows because each update takes the S oldest
    gradients, and earliest deadline first is optimal. A worker may start, and an update may be made, only if the
    condition still holds afterwards. This can't deadlock: once all gradients in flight have arrived, the S oldest may
    always be applied.

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
        self._pending: list[_Pending] = []

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
        return self._total > 0 and len(self._pending) >= self._updates and self._leaves_time(self._next(self._updates))

    @property
    def contributors(self) -> tuple[int, ...]:
        """Replicas of the waiting gradients, the oldest gradient first. A replica may appear several times."""
        return tuple(pending.replica for pending in self._next(len(self._pending)))

    @property
    def waiting(self) -> tuple[int, ...]:
        """`Arrival.number` of each waiting gradient, the oldest first."""
        return tuple(pending.number for pending in self._next(len(self._pending)))

    def is_busy(self, replica: int) -> bool:
        """Returns True if `replica` computes a gradient."""
        return replica in self._computing

    def may_start(self, replica: int) -> bool:
        """Returns True if `replica` takes part, is idle, and a new gradient could be applied within the bound."""
        if not super().may_start(replica) or len(self._pending) >= self._updates:
            return False
        under_way = len(self._computing) + len(self._pending)
        return self._bound is None or under_way < (self._bound + 1) * self._updates

    def is_wanted(self, replica: int, local_step: int) -> bool:
        """Returns False if a computed gradient would be dropped, so that it need not be sent."""
        return self.is_computing(replica, local_step) and not self._is_too_old(local_step)

    def arrived(self, replica: int, local_step: int, time: float) -> base.Arrival:
        """Queues the gradient of `replica` for an update, or drops it if it is too old already.

        The answer has the staleness at arrival. The weight depends on the staleness when the gradient is applied.
        """
        staleness = self._end_computing(replica, local_step, time)
        if staleness is None or self._is_too_old(local_step):
            self._dropped.append(replica)
            return base.Arrival(False, self._step - local_step, 0.0)
        was_due = self.update_due
        self._pending.append(_Pending(self._number, replica, local_step, time))
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
        chosen = self._next(self._updates)
        if not chosen or not (self.update_due or with_fewer):
            raise RuntimeError(f"no update was due in step {self._step}: {len(chosen)} of {self._updates} gradients")
        staleness = tuple(self._step - pending.local_step for pending in chosen)
        weights = tuple(self._scaling.weight(each) if self._scaling else 1.0 for each in staleness)
        self._pending = [pending for pending in self._pending if pending not in chosen]
        update = self._stepped_with(
            time,
            replicas=[pending.replica for pending in chosen],
            times=[pending.time for pending in chosen],
            staleness=staleness,
            weights=weights,
            numbers=[pending.number for pending in chosen],
        )
        if self.update_due:
            self._due_at = time
        return update

    def missing(self) -> tuple[int, ...]:
        """Returns the lost replicas if no replica is alive, else ()."""
        return () if self._alive() else tuple(sorted(self._lost))

    def discard(self) -> None:
        """Drops all waiting gradients."""
        self._dropped += [pending.replica for pending in self._pending]
        self._pending = []

    def _stepped(self) -> None:
        too_old = [pending for pending in self._pending if self._is_too_old(pending.local_step)]
        self._dropped += [pending.replica for pending in too_old]
        self._pending = [pending for pending in self._pending if pending not in too_old]

    def _withdraw(self, replica: int) -> None:
        # Delivered gradients stay: the parameter servers hold them, so that the loss of a worker doesn't matter.
        self._computing.pop(replica, None)
        self._idle_since.pop(replica, None)

    def _next(self, count: int) -> list[_Pending]:
        return sorted(self._pending, key=lambda pending: (pending.local_step, pending.number))[:count]

    def _is_too_old(self, local_step: int) -> bool:
        return self._max_staleness is not None and self._step - local_step > self._max_staleness

    def _leaves_time(self, chosen: list[_Pending]) -> bool:
        """Returns True if all other gradients in flight can still meet the bound after an update from `chosen`."""
        if self._bound is None:
            return True
        local_steps = [local_step for local_step, _ in self._computing.values()]
        local_steps += [pending.local_step for pending in self._pending if pending not in chosen]
        for local_step in local_steps:
            no_later = sum(each <= local_step for each in local_steps)
            updates_left = local_step + self._bound - self._step
            if no_later > updates_left * self._updates:
                return False
        return True
