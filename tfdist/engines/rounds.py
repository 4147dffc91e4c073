# SPDX-License-Identifier: Apache-2.0
"""Where the threads of one process meet a policy: who computes now, and when an update has what it needs.

    Keras' thread                          a replica's thread
      open()                                 start()    waits until the replica may start
                                             ...        computes
                                             arrive()   asks whether it counts
                                             deliver()  has brought it where the update can use it
      collect()   waits, tells the policy that the
                  update is made, and returns the
                  contributions to make it from

The policy is the only one that decides, and it is called under one lock. A replica starts only while Keras waits for
an update: between updates Keras' callbacks may change anything. One that is late goes on computing meanwhile.

No TensorFlow: what is delivered is any object.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.engines import watch
from tfdist.policies.base import Aggregation, Update

POLL_SECS = 0.5
# An accepted contribution that takes so long to be delivered is given up, and another replica asked.
_DELIVERY_SECS = 10.0


class Rounds:
    """A policy at work.

    Args:
      policy: decides; `begin` was called.
      names: what the replicas are called, such as "worker:0".
      stall_timeout_secs: how long to go on with too few replicas alive.
      clock: seconds, monotonic.
      say: takes a line for the person who watches the run; standard error by default.
    """

    def __init__(
        self,
        policy: Aggregation,
        names: Sequence[str],
        stall_timeout_secs: float,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = lambda text: watch.say(f"tfdist: {text}"),
    ) -> None:
        self._policy = policy
        self._names = list(names)
        self._stall_timeout_secs = stall_timeout_secs
        self._clock = clock
        self._say = say
        self._lock = threading.RLock()
        # Two, so that a contribution that is not the last one wakes nobody.
        self._startable = threading.Condition(self._lock)
        self._collectable = threading.Condition(self._lock)
        self._is_open = False
        # Of this update: when a replica was accepted, and what it delivered.
        self._accepted_at: dict[int, float] = {}
        self._delivered: dict[int, Any] = {}
        self._lost: set[int] = set()
        self._too_few_since: float | None = None
        self._error: BaseException | None = None
        # How long a replica's delivery may take, if longer than usual; when anything was last heard of an update.
        self._delivery_secs: dict[int, float] = {}
        self._last_event = clock()

    # In a replica's thread.

    def start(self, replica: int, is_over: Callable[[], bool]) -> int | None:
        """Waits until `replica` may compute.

        Args:
          replica: its index.
          is_over: asked while waiting; whether the thread is wanted elsewhere.

        Returns:
          The local step, or None once `is_over`.
        """
        with self._lock:
            while True:
                if is_over():
                    return None
                if self._error is None and self._may_start(replica):
                    return self._policy.started(replica, self._clock())
                self._startable.wait(POLL_SECS)

    def _may_start(self, replica: int) -> bool:
        return self._is_open and self._policy.may_start(replica)

    def arrive(self, replica: int, local_step: int) -> bool:
        """Says that `replica` has computed; returns whether its contribution is wanted."""
        with self._lock:
            if local_step > self._policy.step:
                return False
            accepted = self._policy.arrived(replica, local_step, self._clock()).accepted
            self._last_event = self._clock()
            if accepted:
                self._accepted_at[replica] = self._clock()
                self._delivered.pop(replica, None)
            return accepted

    def deliver(self, replica: int, local_step: int, contribution: Any) -> None:
        """Hands over a contribution that was wanted; it is ignored if that is no longer so."""
        with self._lock:
            if local_step == self._policy.step and replica in self._policy.contributors:
                self._delivered[replica] = contribution
                self._last_event = self._clock()
                if self._is_complete():
                    self._collectable.notify_all()

    def lose(
        self, replica: int, is_so: Callable[[], bool] = lambda: True, release: Callable[[], None] = lambda: None
    ) -> None:
        """Says that `replica` is gone, and with it what it was doing.

        Args:
          replica: its index.
          is_so: whether that is still so; nobody can bring it back meanwhile.
          release: gives to others what it had.
        """
        with self._lock:
            if replica in self._lost or not is_so():
                return
            release()
            self._lost.add(replica)
            self._policy.lost(replica, self._clock())
            self._forget(replica)
            self._count_the_living()
            self._startable.notify_all()
            # Fewer may be needed now.
            self._collectable.notify_all()

    def bring_back(self, replica: int) -> None:
        """Says that `replica` is there again, if it was lost."""
        with self._lock:
            if replica not in self._lost:
                return
            self._lost.discard(replica)
            self._policy.back(replica, self._clock())
            self._count_the_living()
            self._startable.notify_all()

    def fail(self, replica: int, local_step: int, error: BaseException, is_end: bool = False) -> None:
        """Has `collect` raise what went wrong while `replica` computed; of a gradient that is too late it is only said.

        Args:
          replica: its index.
          local_step: what it computed for.
          error: what it met.
          is_end: whether that is only the end of the data.
        """
        with self._lock:
            if not self._policy.is_computing(replica, local_step):
                return
            self._policy.withdraw(replica)
            if local_step == self._policy.step and self._is_open:
                self._error = self._error or error
                self._collectable.notify_all()
            elif not is_end:
                self._say(f"a late gradient of {self._names[replica]} failed: {type(error).__name__}: {error}")
            self._startable.notify_all()

    def give_up(self, replica: int) -> None:
        """Says that `replica` computes no more, without a contribution; it may start again."""
        with self._lock:
            self._policy.withdraw(replica)
            self._forget(replica)
            self._startable.notify_all()
            self._collectable.notify_all()

    def wake(self) -> None:
        """Has every thread in `start` ask again whether it is over."""
        with self._lock:
            self._startable.notify_all()

    # In Keras' thread.

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Within this block, in which `collect` is called, Keras wants an update.

        If the block raises, what was begun for the update counts no more.
        """
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
            self._startable.notify_all()

    def discard(self) -> None:
        """What was begun for an update counts no more."""
        with self._lock:
            self._abandon()

    def open(self) -> None:
        """Keras wants an update."""
        with self._lock:
            now = self._clock()
            self._is_open = True
            self._last_event = now
            if self._too_few_since is not None:
                # Nobody was needed in the meantime, and somebody may have come back since.
                self._too_few_since = now
            self._policy.opened(now)
            self._startable.notify_all()

    def collect(self, check: Callable[[], None] = lambda: None) -> tuple[list[Any], Update]:
        """Waits until the update has what it needs; no replica starts from then on.

        Args:
          check: called twice a second; may raise.

        Returns:
          What its contributors delivered, in the order of their arrival, and what the policy says of it.

        Raises:
          TimeoutError: for `stall_timeout_secs` too few replicas have been alive, or nothing was heard of any; the
            message names them.
        """
        try:
            while True:
                with self._lock:
                    self._collectable.wait_for(lambda: self._error is not None or self._is_complete(), POLL_SECS)
                    if self._error is not None:
                        raise self._error
                    if self._is_complete():
                        return self._take()
                    self._give_up_late_deliveries()
                    self._check_the_living()
                    self._check_the_silent()
                check()
        finally:
            with self._lock:
                self._is_open = False

    def waited_for(self) -> str:
        """Names those who hold up the update."""
        with self._lock:
            absent = [r for r in range(len(self._names)) if r not in self._delivered and r not in self._lost]
            lost = [f"{self._names[r]} (lost; it has to be started again)" for r in sorted(self._lost)]
            needed = self._policy.replicas_to_aggregate - len(self._delivered)
        return f"{needed} of " + ", ".join([self._names[r] for r in absent] + lost)

    def _take(self) -> tuple[list[Any], Update]:
        # At once, under one lock: a replica that is lost from here on withdraws nothing.
        contributions = [self._delivered[replica] for replica in self._policy.contributors]
        update = self._policy.updated(self._clock())
        self._delivered.clear()
        self._accepted_at.clear()
        for change in update.changes:
            self._say(change.text)
        return contributions, update

    def _abandon(self) -> None:
        # The next update may be of another model: what is there, and what is still being computed, is not for it.
        self._error = None
        for replica in range(len(self._names)):
            self._policy.withdraw(replica)
            self._forget(replica)

    def _is_complete(self) -> bool:
        return self._policy.update_due and all(replica in self._delivered for replica in self._policy.contributors)

    def _forget(self, replica: int) -> None:
        self._accepted_at.pop(replica, None)
        self._delivered.pop(replica, None)

    def _give_up_late_deliveries(self) -> None:
        """Lets others take the place of a replica that does not deliver, if there are any."""
        now = self._clock()
        for replica in self._policy.contributors:
            limit = self._delivery_secs.get(replica, _DELIVERY_SECS)
            others = set(filter(self._policy.takes_part, range(len(self._names)))) - set(self._policy.contributors)
            if others and replica not in self._delivered and now - self._accepted_at[replica] > limit:
                self._policy.withdraw(replica)
                self._forget(replica)
                # It may be no worse than a slow network.
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

    def _check_the_living(self) -> None:
        if self._too_few_since is None or self._clock() - self._too_few_since < self._stall_timeout_secs:
            return
        missing = self._policy.missing()
        raise TimeoutError(
            f"{self._names_of(missing)} did not come back within stall_timeout_secs={self._stall_timeout_secs:g}; the "
            f"other {len(self._names) - len(missing)} replicas are too few for an update of "
            f"{self._policy.replicas_to_aggregate}. Use more spares, or start the lost tasks again."
        )

    def _check_the_silent(self) -> None:
        """Raises if those who are alive don't answer, as a machine that was cut off."""
        if self._clock() - max(self._last_event, self._too_few_since or 0.0) < self._stall_timeout_secs:
            return
        raise TimeoutError(
            f"an update waits for {self.waited_for()}, and nothing was heard of them for "
            f"stall_timeout_secs={self._stall_timeout_secs:g}. Start again what does not answer, or give a slow step "
            "more time."
        )

    def _names_of(self, replicas: Sequence[int]) -> str:
        return ", ".join(self._names[replica] for replica in replicas)
