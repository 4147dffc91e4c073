# SPDX-License-Identifier: Apache-2.0
"""Runs an asynchronous policy among the threads of one process. Replicas don't wait for the end of a step.

    Keras' thread                          a replica's thread
                                             start()      waits until the policy lets the replica start
                                             ...          computes
                                             is_wanted()  returns False if the gradient need not be sent
                                             ...          pushes the gradient
      collect()   waits until enough have    hand_over()
                  arrived, and takes them
      ...         makes the update           (others compute; no replica starts)
      applied()

A replica starts its next gradient as soon as it has handed one over, even if Keras doesn't wait for an update. No
replica starts while an update is being made, so that all variables it reads are of one step.

If the policy lets only some of the waiting replicas start, the one whose last start is longest ago starts first. So
fast replicas wait for a slow one, a slow replica hardly ever waits, and no replica starves.

A gradient counts once it was handed over: the later loss of its replica doesn't withdraw it. Gradients stay for the
next update, also across the end of an epoch, until an error or a call of `discard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.coordination import round_runner
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Update


class StreamRunner(round_runner.RoundRunner):
    """Runner of an asynchronous policy. See `RoundRunner` for the arguments."""

    _policy: Asynchronous
    _starts_ahead = True

    def __init__(self, policy: Asynchronous, *args: Any, **kwargs: Any) -> None:
        super().__init__(policy, *args, **kwargs)
        self._is_updating = False
        # Replicas without data left in this pass over the data.
        self._idle: set[int] = set()
        # Replicas that wait to start.
        self._waiting: set[int] = set()

    @property
    def waiting(self) -> frozenset[int]:
        """Replicas that wait to start."""
        with self._lock:
            return frozenset(self._waiting)

    # In a replica's thread.

    def start(self, replica: int, is_over: Callable[[], bool]) -> int | None:
        """See `RoundRunner.start`."""
        with self._lock:
            self._waiting.add(replica)
            try:
                return super().start(replica, is_over)
            finally:
                self._waiting.discard(replica)
                self._let_start()

    def _is_first(self, replica: int) -> bool:
        first = next(filter(self._is_free, self._policy.turns), None)
        return not self._is_updating and replica == first

    def _let_start(self) -> None:
        """Wakes the replicas that wait to start, if one of them may: each wake-up takes Python's lock."""
        if not self._is_updating and any(map(self._is_free, self._waiting)):
            self._startable.notify_all()

    def _is_free(self, replica: int) -> bool:
        return replica in self._waiting and replica not in self._idle and self._policy.may_start(replica)

    def is_wanted(self, replica: int, local_step: int, input_secs: float = 0.0) -> bool:
        """Returns True if a computed gradient should be sent; else counts it as dropped. See `RoundRunner.arrive`."""
        with self._lock:
            if self._policy.is_wanted(replica, local_step):
                return True
            self._arrive(replica, local_step, input_secs)
            return False

    def hand_over(self, replica: int, local_step: int, contribution: Any, input_secs: float = 0.0) -> None:
        """Hands over a contribution that was pushed. See `RoundRunner.arrive`."""
        with self._lock:
            number = self._arrive(replica, local_step, input_secs)
            if number >= 0:
                self._delivered[number] = contribution

    def _arrive(self, replica: int, local_step: int, input_secs: float) -> int:
        if local_step > self._policy.step:
            return -1
        self._last_event = self._clock()
        try:
            arrival = self._policy.arrived(replica, local_step, self._clock(), input_secs)
        except Exception as error:
            self._fail_update(error)
            raise
        self._let_start()
        if self._policy.update_due or self._is_dry():
            self._collectable.notify_all()
        return arrival.number

    def end(self, replica: int, is_over: Callable[[], bool]) -> None:
        """Notes that the data of `replica` have ended: withdraws what it started, and lets it start no more.

        `is_over` returns True if there are data again: another pass has begun, or a lost replica's data are free.
        """
        with self._lock:
            self._policy.found_no_data(replica)
            if not is_over():
                self._idle.add(replica)
            self._note_change()

    def fail(self, replica: int, local_step: int, error: BaseException, is_end: bool = False) -> None:
        """Makes the next `collect` raise an error of a replica's computation.

        With `is_end` no caller waits for the gradient any more, and the error is only logged.
        """
        with self._lock:
            if not self._policy.is_computing(replica, local_step):
                return
            self._policy.withdraw(replica, self._clock())
            if is_end:
                self._say(f"a gradient of {self._names[replica]} failed: {type(error).__name__}: {error}")
            else:
                self._error = self._error or error
            self._note_change()

    def resume(self) -> None:
        """Notes that there may be data again for all replicas."""
        with self._lock:
            self._idle.clear()
            self._startable.notify_all()

    def bring_back(self, replica: int) -> None:
        """Notes that `replica` was restarted, if it was lost."""
        with self._lock:
            self._idle.discard(replica)
            super().bring_back(replica)

    # In Keras' thread.

    def collect(self, check: Any = lambda: None) -> tuple[list[Any], Update] | None:
        """Waits until enough contributions were handed over; no replica starts from then until `applied`.

        Returns:
          The contributions and the policy's `Update`; None if the data have ended and no contribution is left.
        """
        while True:
            with self._lock:
                self._collectable.wait_for(
                    lambda: self._error is not None or self._policy.update_due or self._is_dry(), round_runner.POLL_SECS
                )
                if self._error is not None:
                    raise self._error
                if self._policy.update_due or self._is_dry():
                    return self._take()
                self._check_progress()
            check()

    def applied(self) -> None:
        """Notes that the collected update has been made, or has failed."""
        with self._lock:
            self._is_updating = False
            self._let_start()

    def _is_dry(self) -> bool:
        """Returns True if no more contributions will arrive in this pass; False while no replica is alive."""
        present = [replica for replica in range(len(self._names)) if self._policy.takes_part(replica)]
        busy = any(self._policy.is_busy(replica) for replica in range(len(self._names)))
        return bool(present) and not busy and self._idle.issuperset(present)

    def _take(self) -> tuple[list[Any], Update] | None:
        if not self._policy.contributors:
            return None
        update = self._policy.updated(self._clock(), with_fewer=not self._policy.update_due)
        contributions = [self._delivered.pop(number) for number in update.numbers]
        for dropped in self._delivered.keys() - set(self._policy.waiting):
            del self._delivered[dropped]
        self._is_updating = True
        return contributions, update

    def _abandon(self) -> None:
        super()._abandon()
        self._is_updating = False
        self._policy.discard()
        self._delivered.clear()

    def _forget(self, replica: int) -> None:
        """Does nothing: contributions that were handed over stay."""

    def waited_for(self) -> str:
        """Returns the names of the replicas that compute for the update, and of the lost ones."""
        with self._lock:
            replicas = range(len(self._names))
            busy = [self._names[r] for r in replicas if self._policy.is_busy(r)]
            lost = [f"{self._names[r]} (lost; it has to be started again)" for r in sorted(self._lost)]
        return ", ".join(busy + lost) or "any worker, to start"
