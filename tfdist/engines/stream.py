# SPDX-License-Identifier: Apache-2.0
"""Where the threads of one process meet a policy of asynchronous training: like `Rounds`, but nobody waits for a step.

    Keras' thread                          a replica's thread
                                             start()     may it? (a policy may hold it back)
                                             ...         computes
                                             is_wanted() else it need not be sent
                                             ...         brings it where the update can use it
      collect()   waits until enough have    arrive()
                  arrived, and takes them
      ...         makes the update           (others compute; nobody starts)
      applied()

A replica goes on at once when it has given a gradient, whether or not Keras waits for an update. It starts none
while an update is being made, so that what it reads is of one step.

Where a policy lets only some of those start who wait, the one whose last start is the longest ago is first. So fast
replicas wait for a slow one, which hardly ever waits itself, and each comes to its turn.

A gradient counts once it is there: a replica that dies while it brings one takes away nothing. What was given stays
for the next update, also over the end of an epoch; only an error, or another step, discards it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.engines import rounds
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Update


class Stream(rounds.Rounds):
    """A policy of asynchronous training at work. See `Rounds` for its arguments."""

    _policy: Asynchronous

    def __init__(self, policy: Asynchronous, *args: Any, **kwargs: Any) -> None:
        super().__init__(policy, *args, **kwargs)
        self._is_updating = False
        # Replicas for which there is nothing left to compute from in this pass over the data.
        self._idle: set[int] = set()
        # Those that wait to start.
        self._waiting: set[int] = set()

    # In a replica's thread.

    def start(self, replica: int, is_over: Callable[[], bool]) -> int | None:
        """See `Rounds.start`."""
        with self._lock:
            self._waiting.add(replica)
            try:
                return super().start(replica, is_over)
            finally:
                self._waiting.discard(replica)
                # There may be room for the next one.
                self._startable.notify_all()

    def _may_start(self, replica: int) -> bool:
        first = next(filter(self._is_free, self._policy.turns), None)
        return not self._is_updating and replica == first

    def _is_free(self, replica: int) -> bool:
        return replica in self._waiting and replica not in self._idle and self._policy.may_start(replica)

    def is_wanted(self, replica: int, local_step: int) -> bool:
        """Whether what was computed is worth sending. If not, it counts as dropped."""
        with self._lock:
            if self._policy.is_wanted(replica, local_step):
                return True
            self._arrive(replica, local_step)
            return False

    def hand_over(self, replica: int, local_step: int, contribution: Any) -> None:
        """Gives a contribution that is where the update can use it."""
        with self._lock:
            number = self._arrive(replica, local_step)
            if number >= 0:
                self._delivered[number] = contribution

    def _arrive(self, replica: int, local_step: int) -> int:
        if local_step > self._policy.step:
            return -1
        self._last_event = self._clock()
        arrival = self._policy.arrived(replica, local_step, self._clock())
        self._startable.notify_all()
        self._collectable.notify_all()
        return arrival.number

    def end(self, replica: int, is_over: Callable[[], bool]) -> None:
        """Says that `replica` has nothing to compute from: what it started is no gradient, and it starts no more.

        Args:
          replica: its index.
          is_over: whether it may have, by now: another pass has begun, or a lost one has left something.
        """
        with self._lock:
            self._policy.withdraw(replica)
            if not is_over():
                self._idle.add(replica)
            self._startable.notify_all()
            self._collectable.notify_all()

    def fail(self, replica: int, local_step: int, error: BaseException, is_end: bool = False) -> None:
        """Has the next `collect` raise what went wrong while `replica` computed.

        Args:
          replica: its index.
          local_step: what it computed for.
          error: what it met.
          is_end: whether nobody waits for it any more: then it is only said.
        """
        with self._lock:
            if not self._policy.is_computing(replica, local_step):
                return
            self._policy.withdraw(replica)
            if is_end:
                self._say(f"a gradient of {self._names[replica]} failed: {type(error).__name__}: {error}")
            else:
                self._error = self._error or error
            self._startable.notify_all()
            self._collectable.notify_all()

    def resume(self) -> None:
        """Says that there may be something to compute from again, for everybody."""
        with self._lock:
            self._idle.clear()
            self._startable.notify_all()

    def bring_back(self, replica: int) -> None:
        """Says that `replica` is there again, if it was lost."""
        with self._lock:
            self._idle.discard(replica)
            super().bring_back(replica)

    # In Keras' thread.

    def collect(self, check: Any = lambda: None) -> tuple[list[Any], Update] | None:
        """Waits until the update has what it needs; nobody starts from then until `applied`.

        Returns:
          The contributions, and what the policy says of them; None if there is nothing left to make one from.
        """
        while True:
            with self._lock:
                self._collectable.wait_for(
                    lambda: self._error is not None or self._policy.update_due or self._is_dry(), rounds.POLL_SECS
                )
                if self._error is not None:
                    raise self._error
                if self._policy.update_due or self._is_dry():
                    return self._take()
                self._check_the_living()
                self._check_the_silent()
            check()

    def applied(self) -> None:
        """Says that the update that was collected has been made, or has failed."""
        with self._lock:
            self._is_updating = False
            self._startable.notify_all()

    def _is_dry(self) -> bool:
        """Whether no more contributions will come in this pass. While nobody is alive, nobody knows."""
        present = [replica for replica in range(len(self._names)) if self._policy.takes_part(replica)]
        busy = any(self._policy.is_busy(replica) for replica in range(len(self._names)))
        return bool(present) and not busy and self._idle.issuperset(present)

    def _take(self) -> tuple[list[Any], Update] | None:
        if not self._policy.contributors:
            return None
        update = self._policy.updated(self._clock(), with_fewer=not self._policy.update_due)
        contributions = [self._delivered.pop(number) for number in update.numbers]
        self._forget_dropped()
        self._is_updating = True
        return contributions, update

    def _forget_dropped(self) -> None:
        waiting = set(self._policy.waiting)
        for number in [number for number in self._delivered if number not in waiting]:
            del self._delivered[number]

    def _abandon(self) -> None:
        super()._abandon()
        self._is_updating = False
        self._policy.discard()
        self._delivered.clear()

    def _forget(self, replica: int) -> None:
        """What a replica has given stays."""

    def waited_for(self) -> str:
        """Names those who compute what the update waits for."""
        with self._lock:
            replicas = range(len(self._names))
            busy = [self._names[r] for r in replicas if self._policy.is_busy(r)]
            lost = [f"{self._names[r]} (lost; it has to be started again)" for r in sorted(self._lost)]
        return ", ".join(busy + lost) or "any worker, to start"
