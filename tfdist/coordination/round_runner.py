# SPDX-License-Identifier: Apache-2.0
"""Runs a synchronous policy among the threads of one process: starts replicas, and collects their contributions.

    Keras' thread                          a replica's thread
      open()                                 start()    waits until the replica may start
                                             ...        computes
                                             arrive()   returns True if the policy accepts the contribution
                                             deliver()  hands the accepted contribution over
      collect()   waits until enough are
                  delivered, and returns
                  the contributions

The policy makes all decisions, and is called under one lock. A replica starts only while Keras waits for an update:
between updates Keras' callbacks may change anything. A late replica continues to compute meanwhile.

No TensorFlow import: a contribution may be any object.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist import _log
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Aggregation, Update

POLL_SECS = 0.5
# An accepted contribution that is not delivered within this time is dropped, and another replica replaces it.
_DELIVERY_SECS = 10.0


class RoundRunner:
    """Runner of a synchronous policy.

    Args:
      policy: decides which contributions form an update; `begin` was called.
      names: the replicas' names, such as "worker:0".
      stall_timeout_secs: how long to wait while too few replicas are alive.
      clock: returns seconds, monotonic.
      say: writes a line to the log; standard error by default.
    """

    def __init__(
        self,
        policy: Aggregation,
        names: Sequence[str],
        stall_timeout_secs: float,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.say,
    ) -> None:
        self._policy = policy
        self._names = list(names)
        self._stall_timeout_secs = stall_timeout_secs
        self._clock = clock
        self._say = say
        self._lock = threading.RLock()
        # Two conditions, so that a contribution before the last one wakes no thread.
        self._startable = threading.Condition(self._lock)
        self._collectable = threading.Condition(self._lock)
        self._is_open = False
        # True once all contributions of the update are delivered.
        self._is_complete = False
        # The policy's: updates are made here.
        self._step = policy.step
        # For the current update: time of acceptance, and contribution, by replica.
        self._accepted_at: dict[int, float] = {}
        self._delivered: dict[int, Any] = {}
        self._lost: set[int] = set()
        self._too_few_since: float | None = None
        self._error: BaseException | None = None
        # Replica -> longest delivery time, where it was raised.
        self._delivery_secs: dict[int, float] = {}
        # Called when a replica is lost, with True, and when it is back, with False.
        self.on_loss: Callable[[int, bool], object] = lambda replica, is_lost: None
        # Time of the last progress of any replica.
        self._last_event = clock()

    # In a replica's thread.

    def start(self, replica: int, is_over: Callable[[], bool]) -> int | None:
        """Waits until `replica` may compute.

        Args:
          replica: index of the replica.
          is_over: called while waiting; returns True to end the wait.

        Returns:
          The local step, or None if `is_over` returned True.
        """
        with self._lock:
            while True:
                if is_over():
                    return None
                try:
                    # Of a synchronous policy, who has contributed to this update waits for the next one.
                    if self._is_next(replica) and self._error is None and replica not in self._accepted_at:
                        local_step = self._policy.start(replica, self._clock())
                        if local_step is not None:
                            return local_step
                except Exception as error:
                    # The thread goes on, for the next update.
                    self._fail_update(error)
                self._startable.wait(POLL_SECS)

    def arrive(self, replica: int, local_step: int, input_secs: float = 0.0) -> bool:
        """Notes that `replica` has computed a contribution; returns True if the policy accepts it.

        Args:
          replica: index of the replica.
          local_step: local step of the contribution.
          input_secs: time for which the replica waited for its batch; 0 if unknown.
        """
        with self._lock:
            if local_step > self._step:
                return False
            now = self._last_event = self._clock()
            try:
                accepted = self._policy.arrived(replica, local_step, now, input_secs).accepted
            except Exception as error:
                self._fail_update(error)
                raise
            if accepted:
                self._accepted_at[replica] = now
                self._delivered.pop(replica, None)
            return accepted

    def deliver(self, replica: int, local_step: int, contribution: Any) -> None:
        """Hands over an accepted contribution; ignored if it was withdrawn in the meantime."""
        with self._lock:
            if replica in self._accepted_at and local_step == self._step:
                self._delivered[replica] = contribution
                self._last_event = self._clock()
                # `_note_change`, without a call.
                needed = max(len(self._accepted_at), self._policy.replicas_to_aggregate)
                self._is_complete = len(self._delivered) >= needed
                if self._is_complete:
                    self._collectable.notify_all()

    def lose(
        self, replica: int, is_so: Callable[[], bool] = lambda: True, release: Callable[[], None] = lambda: None
    ) -> None:
        """Notes that `replica` is lost, and withdraws its contribution.

        Args:
          replica: index of the replica.
          is_so: returns False if the replica is back already. Called under the lock.
          release: returns the replica's work, such as its shard of the data, to the other replicas.
        """
        with self._lock:
            if replica in self._lost or not is_so():
                return
            release()
            self._lost.add(replica)
            self._policy.lost(replica, self._clock())
            self.on_loss(replica, True)
            self._forget(replica)
            self._count_the_living()
            # The policy may need fewer contributions now.
            self._note_change()

    def bring_back(self, replica: int) -> None:
        """Notes that `replica` was restarted, if it was lost."""
        with self._lock:
            if replica not in self._lost:
                return
            self._lost.discard(replica)
            self._policy.recovered(replica, self._clock())
            self.on_loss(replica, False)
            self._count_the_living()
            self._startable.notify_all()

    def fail(self, replica: int, local_step: int, error: BaseException, is_end: bool = False) -> None:
        """Makes `collect` raise an error of a replica's computation, or of the push of an accepted gradient.

        The error of a late gradient is only logged. With `is_end` it is only the end of the data, and never logged.
        """
        with self._lock:
            is_present = local_step == self._policy.step and replica in self._policy.contributors
            is_pushed = is_present and replica not in self._delivered
            if not self._policy.is_computing(replica, local_step) and not is_pushed:
                return
            if is_end:
                self._policy.found_no_data(replica)
            else:
                self._policy.withdraw(replica, self._clock())
            self._forget(replica)
            if local_step == self._policy.step and self._is_open:
                self._error = self._error or error
            elif not is_end:
                self._say(f"a late gradient of {self._names[replica]} failed: {type(error).__name__}: {error}")
            # All that are accepted may be delivered already, and not be collected yet.
            self._note_change()

    def give_up(self, replica: int) -> None:
        """Notes that `replica` ended its computation without a contribution; it may start again."""
        with self._lock:
            self._policy.found_no_data(replica)
            self._forget(replica)
            self._note_change()

    def _is_next(self, replica: int) -> bool:
        """Returns True if `replica` may be the next one to start: while an update is requested."""
        del replica
        return self._is_open

    def wake(self) -> None:
        """Wakes every thread in `start`, which then calls its `is_over`."""
        with self._lock:
            self._startable.notify_all()

    # In Keras' thread.

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Opens an update for this block, in which `collect` is called; withdraws all contributions on an error."""
        try:
            self.open()
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            with self._lock:
                self._is_open = False

    def limit(self, count: int) -> None:
        """Lets only the first `count` of the living replicas take part from now on."""
        with self._lock:
            self._policy.limit(count)
            self._note_change()

    def discard(self) -> None:
        """Withdraws all contributions, computed or not."""
        with self._lock:
            self._abandon()

    def open(self) -> None:
        """Notes that Keras asks for an update; replicas may start from now on."""
        with self._lock:
            now = self._clock()
            self._is_open = True
            self._last_event = now
            if self._too_few_since is not None:
                # The timeout counts from here: no replica was needed before, and some may have returned.
                self._too_few_since = now
            self._policy.opened(now)
            self._startable.notify_all()

    def collect(self, check: Callable[[], None] = lambda: None) -> tuple[list[Any], Update]:
        """Waits until all contributions of the update are delivered; no replica starts afterwards.

        Args:
          check: called twice a second; may raise.

        Returns:
          The contributions, in the order of their arrival, and the policy's `Update`.

        Raises:
          TimeoutError: for `stall_timeout_secs` too few replicas were alive, or no replica made progress. The message
            names them.
        """
        try:
            while True:
                with self._lock:
                    if self._error is None and not self._is_complete:
                        self._collectable.wait(POLL_SECS)
                    if self._error is not None:
                        raise self._error
                    if self._is_complete:
                        # Under the same lock as the check, so that no loss of a replica comes in between.
                        update = self._policy.updated(self._clock())
                        self._step = update.step
                        contributions = [*map(self._delivered.__getitem__, update.contributors)]
                        self._delivered.clear()
                        self._accepted_at.clear()
                        self._is_complete = False
                        for change in update.changes:
                            self._say(change.text)
                        return contributions, update
                    self._give_up_late_deliveries()
                    self._check_progress()
                check()
        finally:
            with self._lock:
                self._is_open = False

    def waited_for(self) -> str:
        """Returns the names of the replicas that hold up the update."""
        with self._lock:
            done = self._delivered.keys() | self._lost
            absent = [r for r in range(len(self._names)) if r not in done and not self._policy.is_spare(r)]
            lost = [f"{self._names[r]} (lost; it has to be started again)" for r in sorted(self._lost)]
            needed = self._policy.replicas_to_aggregate - len(self._delivered)
        return f"{needed} of " + ", ".join([self._names[r] for r in absent] + lost)

    def _fail_update(self, error: Exception) -> None:
        """Makes `collect` raise an exception of the policy, after which no replica counts as computing."""
        self._error = self._error or error
        self._collectable.notify_all()

    def _abandon(self) -> None:
        # The next update may be of another model, so no present contribution may enter it.
        self._error = None
        # An update whose hooks have raised was counted.
        self._step = self._policy.step
        for replica in range(len(self._names)):
            self._policy.withdraw(replica, self._clock())
            self._forget(replica)

    def _note_change(self) -> None:
        """Wakes all threads; `collect` returns if all accepted contributions, and enough of them, are delivered."""
        needed = max(len(self._accepted_at), self._policy.replicas_to_aggregate)
        self._is_complete = len(self._delivered) >= needed
        self._startable.notify_all()
        self._collectable.notify_all()

    def _forget(self, replica: int) -> None:
        self._is_complete = False
        self._accepted_at.pop(replica, None)
        self._delivered.pop(replica, None)

    def _give_up_late_deliveries(self) -> None:
        """Withdraws accepted contributions that are not delivered in time, if another replica can replace them."""
        now = self._clock()
        for replica in self._policy.contributors:
            limit = self._delivery_secs.get(replica, _DELIVERY_SECS)
            others = set(filter(self._policy.takes_part, range(len(self._names)))) - set(self._policy.contributors)
            if others and replica not in self._delivered and now - self._accepted_at[replica] > limit:
                self._policy.withdraw(replica, self._clock())
                self._forget(replica)
                # The network may only be slow.
                self._delivery_secs[replica] = 2 * limit
                self._say(f"a gradient of {self._names[replica]} was not delivered for {limit:g} s; dropped")
                self._startable.notify_all()

    def _count_the_living(self) -> None:
        missing = self._policy.missing()
        if not missing:
            self._too_few_since = None
        elif self._too_few_since is None:
            self._too_few_since = self._clock()
            self._say(
                f"{self._names_of(missing)} lost; the other {len(self._names) - len(missing)} replicas are too few for "
                f"an update of {self._policy.replicas_to_aggregate}; training goes on when one comes back, or fails "
                f"after {self._stall_timeout_secs:g} s"
            )

    def _check_progress(self) -> None:
        """Raises TimeoutError if for long too few replicas were alive, or no living one has made progress."""
        limit, since = f"stall_timeout_secs={self._stall_timeout_secs:g}", self._too_few_since
        if self._clock() - (self._last_event if since is None else since) < self._stall_timeout_secs:
            return
        if since is None:
            # For example, because its network is cut.
            raise TimeoutError(
                f"an update waits for {self.waited_for()}, and nothing was heard of them for {limit}. Start again what "
                "does not answer, or give a slow step more time."
            )
        missing = self._policy.missing()
        raise TimeoutError(
            f"{self._names_of(missing)} did not come back within {limit}; the other {len(self._names) - len(missing)} "
            f"replicas are too few for an update of {self._policy.replicas_to_aggregate}. Use more spares, or start "
            "the lost tasks again."
        )

    def _names_of(self, replicas: Sequence[int]) -> str:
        return ", ".join(self._names[replica] for replica in replicas)


# Runs an asynchronous policy among the threads of one process. Replicas don't wait for the end of a step.
#
#     Keras' thread                          a replica's thread
#                                              start()      waits until the policy lets the replica start
#                                              ...          computes
#                                              is_wanted()  returns False if the gradient need not be sent
#                                              ...          pushes the gradient
#       collect()   waits until enough have    hand_over()
#                   arrived, and takes them
#       ...         makes the update           (others compute; no replica starts)
#       applied()
#
# A replica starts its next gradient as soon as it has handed one over, even if Keras doesn't wait for an update. No
# replica starts while an update is being made, so that all variables it reads are of one step.
#
# If the policy lets only some of the waiting replicas start, the one whose last start is longest ago starts first. So
# fast replicas wait for a slow one, a slow replica hardly ever waits, and no replica starves.
#
# A gradient counts once it was handed over: the later loss of its replica doesn't withdraw it. Gradients stay for the
# next update, also across the end of an epoch, until an error or a call of `discard`.


class StreamRunner(RoundRunner):
    """Runner of an asynchronous policy. See `RoundRunner` for the arguments."""

    _policy: Asynchronous

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

    def _is_next(self, replica: int) -> bool:
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
                    lambda: self._error is not None or self._policy.update_due or self._is_dry(), POLL_SECS
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
