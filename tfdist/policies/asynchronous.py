# SPDX-License-Identifier: Apache-2.0
"""Asynchronous updates: what SoftSync, StalenessScaling, DropStale and BoundedStaleness come to together."""

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
    """Makes each update from any S gradients, the oldest first; a worker goes on at once when it has given one.

    A worker doesn't start one while S gradients wait: their update comes first, and makes what it will read newer.

    With a bound, a gradient of local step L can be applied up to step L + s at the latest, which is its deadline. It
    can be kept for all that are under way if and only if no more than (d - step + 1) * S of them have a deadline of at
    most d, for each d, because each update takes S of them and the oldest first (earliest deadline first is optimal).
    So a worker may start, and an update may be made, if this holds afterwards. It can't block: once all that are under
    way have arrived, the oldest S may always be applied.

    Args:
      soft_sync: says S; 1 without.
      scaling: says what a gradient is multiplied by; 1.0 without.
      drop: says which gradients are too old to be used; none without.
      bounded: says how old a gradient may become; there is no limit without.
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
        """Whether replicas start only when Keras asks for an update: no, they go on."""
        return False

    @property
    def is_weighted(self) -> bool:
        """Whether gradients may have other weights than 1."""
        return self._scaling is not None

    @property
    def replicas_to_aggregate(self) -> int:
        """S, how many gradients an update is made of."""
        return self._updates

    @property
    def update_due(self) -> bool:
        """Whether S gradients wait, and their update would make none that is under way too old."""
        return self._total > 0 and len(self._pending) >= self._updates and self._leaves_time(self._next(self._updates))

    @property
    def contributors(self) -> tuple[int, ...]:
        """Whose gradients wait, the oldest first; a replica may come several times."""
        return tuple(pending.replica for pending in self._next(len(self._pending)))

    @property
    def waiting(self) -> tuple[int, ...]:
        """The numbers of the gradients that wait, the oldest first."""
        return tuple(pending.number for pending in self._next(len(self._pending)))

    def is_busy(self, replica: int) -> bool:
        """Whether a gradient of `replica` is under way."""
        return replica in self._computing

    def may_start(self, replica: int) -> bool:
        """Whether `replica` is alive, takes part, is not computing, and its gradient could be applied in time."""
        if not super().may_start(replica) or len(self._pending) >= self._updates:
            return False
        under_way = len(self._computing) + len(self._pending)
        return self._bound is None or under_way < (self._bound + 1) * self._updates

    def is_wanted(self, replica: int, local_step: int) -> bool:
        """Whether a gradient that was computed may still count; else it need not be sent."""
        return self.is_computing(replica, local_step) and not self._is_too_old(local_step)

    def arrived(self, replica: int, local_step: int, time: float) -> base.Arrival:
        """The gradient of `replica` is there; it waits for its update, unless it is too old already.

        What counts is the staleness when it is applied; the answer tells what it is now.
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
        """The update that was due has been made: the global step is one higher.

        Args:
          time: when.
          with_fewer: whether it was made of what there was, because no more will come.

        Raises:
          RuntimeError: none was due.
          ValueError: the user's rule gave no weight.
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
        """The lost replicas, if nobody is alive; else nobody."""
        return () if self._alive() else tuple(sorted(self._lost))

    def discard(self) -> None:
        """What waits counts no more."""
        self._dropped += [pending.replica for pending in self._pending]
        self._pending = []

    def _stepped(self) -> None:
        too_old = [pending for pending in self._pending if self._is_too_old(pending.local_step)]
        self._dropped += [pending.replica for pending in too_old]
        self._pending = [pending for pending in self._pending if pending not in too_old]

    def _withdraw(self, replica: int) -> None:
        # What it has delivered is where the update can use it, whatever becomes of the replica.
        self._computing.pop(replica, None)
        self._idle_since.pop(replica, None)

    def _next(self, count: int) -> list[_Pending]:
        return sorted(self._pending, key=lambda pending: (pending.local_step, pending.number))[:count]

    def _is_too_old(self, local_step: int) -> bool:
        return self._max_staleness is not None and self._step - local_step > self._max_staleness

    def _leaves_time(self, chosen: list[_Pending]) -> bool:
        """Whether all others under way can still be applied in time after an update from those."""
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
