# SPDX-License-Identifier: Apache-2.0
"""What every policy has, and those that decide what an update is made of: the questions that an engine asks, the
answers, and who is doing what.

A policy touches no tensor, no clock, no log and no thread: it is told what happened and when, and answers with values.
So one object drives the engines, the simulator and the tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Answer to `Policy.arrived`.

    Attributes:
      accepted: whether the gradient enters the update.
      staleness: global step - local step.
      weight: what to multiply it by, as far as that is known yet; 0.0 if not accepted.
      number: of this gradient among those that were accepted; -1 if it was not.
    """

    accepted: bool
    staleness: int
    weight: float
    number: int = -1


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that a person should be told, such as another number of spares, in one line of text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Update:
    """Answer to `Policy.updated`: what the update was made of.

    Attributes:
      step: the global step after this update.
      contributors: replicas, in the order in which their gradients arrived.
      dropped: replicas whose gradient was dropped since the update before, in order; one may come twice.
      staleness: of the contributors' gradients, in the same order.
      wait_secs: from the opening of this step to the event after which enough gradients were there (0 if they were
        there when Keras asked). A step opens when Keras asks for it, or at the update before if it was not said.
      spread_secs: from the first to the last gradient of this update.
      changes: what changed since the update before.
      weights: what the contributors' gradients are multiplied by, in the same order.
      numbers: of the contributors' gradients, see `Arrival`, in the same order.
      held_secs: how long each replica that had given a gradient was kept from starting another one, by replica, since
        the update before.
    """

    step: int
    contributors: tuple[int, ...]
    dropped: tuple[int, ...]
    staleness: tuple[int, ...]
    wait_secs: float
    spread_secs: float
    changes: tuple[Change, ...]
    weights: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    held_secs: tuple[float, ...] = ()

    @staticmethod
    def of_one(step: int, replica: int, staleness: int) -> Update:
        """An update that one replica made as soon as it had a gradient, with no policy to ask."""
        return Update(step, (replica,), (), (staleness,), 0.0, 0.0, (), (1.0,))


@dataclasses.dataclass(frozen=True)
class _Accepted:
    """A gradient that waits for its update."""

    staleness: int
    time: float
    number: int


class Policy:
    """What a strategy takes in `policies=[...]`; one object belongs to one strategy."""

    def __init__(self) -> None:
        self._strategy = ""
        self._total = 0

    def begin(self, total_num_replicas: int, strategy: str) -> None:
        """Called once, by the constructor of the strategy that this policy is for.

        Args:
          total_num_replicas: how many replicas compute gradients.
          strategy: the strategy's name, for messages.

        Raises:
          ValueError: the policy makes no sense with this number.
          RuntimeError: the policy belongs to another strategy already.
        """
        if self._total:
            raise RuntimeError(
                f"{self!r} is a policy of another strategy already ({self._strategy} with {self._total} replicas); one "
                f"policy object belongs to one strategy. Give {strategy} a new one."
            )
        if total_num_replicas < 1:
            raise ValueError(f"{strategy} has no replica. Received: total_num_replicas={total_num_replicas}")
        self._check_replicas(total_num_replicas, strategy)
        self._total = total_num_replicas
        self._strategy = strategy

    @property
    def total_num_replicas(self) -> int:
        """How many replicas there are, dead or alive; 0 before `begin`."""
        return self._total

    def state(self) -> dict[str, Any]:
        """What a new policy has to be told to go on from here, as JSON data; nothing, unless a policy says more."""
        return {}

    def take(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` has returned; called between two updates."""

    def _check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """Raises ValueError if the policy makes no sense with so many replicas."""


def is_count(value: object, *, at_least: int) -> bool:
    """Whether `value` is a whole number, and not too small."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


class Aggregation(Policy):
    """Decides which gradients an update is made of.

    Replicas are the integers 0 to total_num_replicas - 1, and times are seconds on one monotonic clock. The caller
    holds a lock around each call, and one from the moment it sees `update_due` to `updated`: a loss in between
    withdraws a gradient.

    For those who write one: say `replicas_to_aggregate` and `_accepts`; the other methods that start with an underscore
    and do nothing here are told what happened, after the books were brought up to date.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        self._lost: set[int] = set()
        # Replica -> (local step, time at which it started).
        self._computing: dict[int, tuple[int, float]] = {}
        # Who has started ever, in the order of the last starts.
        self._started: dict[int, None] = {}
        # What this step's update has so far, in the order of arrival.
        self._accepted: dict[int, _Accepted] = {}
        # Replicas whose gradient was of this step, but not needed.
        self._surplus: set[int] = set()
        self._opened_at = 0.0
        self._due_at = 0.0
        self._dropped: list[int] = []
        self._changes: list[Change] = []
        self._number = 0
        # How many replicas take part, if not all, and which.
        self._limit: int | None = None
        self._taking_part: set[int] = set()
        # Replica -> when its last gradient arrived, if it has not started since; what that came to since the update.
        self._idle_since: dict[int, float] = {}
        self._held: dict[int, float] = {}

    @property
    def replicas_to_aggregate(self) -> int:
        """How many gradients the update that is being collected is made of."""
        raise NotImplementedError

    @property
    def is_synchronous(self) -> bool:
        """Whether replicas start only when Keras asks for an update."""
        return True

    @property
    def is_weighted(self) -> bool:
        """Whether gradients may have other weights than 1."""
        return False

    @property
    def step(self) -> int:
        """The global step: how many updates were made."""
        return self._step

    @property
    def update_due(self) -> bool:
        """Whether enough gradients were accepted."""
        return self._total > 0 and len(self._accepted) >= self.replicas_to_aggregate

    @property
    def contributors(self) -> tuple[int, ...]:
        """Whose gradients this step's update has so far, in the order of arrival."""
        return tuple(self._accepted)

    def opened(self, time: float) -> None:
        """Keras asked for the update of this step: `Update.wait_secs` counts from here.

        Replicas may start before, right after the update of the step before; an engine that must not compute ahead
        asks `may_start` only once Keras has asked.
        """
        self._opened_at = time
        # What passed since the update before is not the policy's doing: nobody wanted an update.
        self._idle_since = dict.fromkeys(self._idle_since, time)

    def limit(self, count: int) -> None:
        """From now on only so many of the replicas that are alive take part: those who do already, and the next ones.

        Another one stands in for one that is lost, and goes on when that is back.
        """
        self._limit = count
        self._fill()

    def takes_part(self, replica: int) -> bool:
        """Whether `replica` is alive, and one of those that take part."""
        self._check(replica)
        return replica not in self._lost and (self._limit is None or replica in self._taking_part)

    def may_start(self, replica: int) -> bool:
        """Whether `replica` is alive, takes part, is not computing, and has not been heard in this step."""
        heard = replica in self._accepted or replica in self._surplus or replica in self._computing
        return self.takes_part(replica) and not heard

    @property
    def turns(self) -> tuple[int, ...]:
        """All replicas, in the order in which they are to start where not all may: whose last start is longest ago."""
        new = (replica for replica in range(self._total) if replica not in self._started)
        return *new, *self._started

    def started(self, replica: int, time: float) -> int:
        """`replica` starts to compute a gradient.

        Returns:
          The local step that the gradient belongs to: the global step whose variables it is computed from.

        Raises:
          RuntimeError: it may not start.
        """
        if not self.may_start(replica):
            raise RuntimeError(f"replica {replica} may not start in step {self._step}: it {self._doing(replica)}")
        self._computing[replica] = (self._step, time)
        self._started.pop(replica, None)
        self._started[replica] = None
        self._hold(replica, time)
        self._idle_since.pop(replica, None)
        return self._step

    def arrived(self, replica: int, local_step: int, time: float) -> Arrival:
        """The gradient of `replica` is there, computed from the variables of `local_step`.

        A gradient that nobody is known to compute (its replica was lost meanwhile) is dropped.
        """
        staleness = self._end_computing(replica, local_step, time)
        if staleness is None or not self._accepts(replica, local_step):
            self._dropped.append(replica)
            if staleness == 0:
                self._surplus.add(replica)
            return Arrival(False, self._step - local_step, 0.0)
        self._accepted[replica] = _Accepted(staleness, time, self._number)
        self._number += 1
        if self.update_due:
            self._due_at = time
        return Arrival(True, staleness, 1.0, self._number - 1)

    def updated(self, time: float) -> Update:
        """The update that was due has been made: the global step is one higher.

        Raises:
          RuntimeError: none was due.
        """
        if not self.update_due:
            raise RuntimeError(
                f"no update was due in step {self._step}: it has {len(self._accepted)} of "
                f"{self.replicas_to_aggregate if self._total else 'unknown'} gradients"
            )
        accepted, self._accepted = self._accepted, {}
        return self._stepped_with(
            time,
            replicas=list(accepted),
            times=[gradient.time for gradient in accepted.values()],
            staleness=tuple(gradient.staleness for gradient in accepted.values()),
            weights=(1.0,) * len(accepted),
            numbers=[gradient.number for gradient in accepted.values()],
        )

    def lost(self, replica: int, time: float) -> None:
        """`replica` died. What it computes is gone; so is its gradient in this step's update.

        The gradient is withdrawn because it may have died while pushing it.
        """
        self._check(replica)
        was_due = self.update_due
        self._lost.add(replica)
        self._taking_part.discard(replica)
        self._withdraw(replica)
        self._fill()
        self._shrunk()
        if self.update_due and not was_due:
            self._due_at = time

    def back(self, replica: int, time: float) -> None:
        """`replica` is there again and takes part from now on, as if new."""
        del time  # Part of the event; those who need it override this.
        self._check(replica)
        # It may have died and returned before anybody saw it die.
        self._withdraw(replica)
        self._lost.discard(replica)
        self._fill()
        self._returned(replica)

    def is_computing(self, replica: int, local_step: int) -> bool:
        """Whether a gradient of `replica` for `local_step` is awaited: it has started, and was not withdrawn."""
        self._check(replica)
        computing = self._computing.get(replica)
        return computing is not None and computing[0] == local_step

    def withdraw(self, replica: int) -> None:
        """What `replica` computes, or has given to this step's update, counts no more; it may start again."""
        self._check(replica)
        self._withdraw(replica)

    def missing(self) -> tuple[int, ...]:
        """The lost replicas, if too few are alive for an update; else nobody."""
        enough = self._total - len(self._lost) >= self.replicas_to_aggregate
        return () if enough else tuple(sorted(self._lost))

    def _hold(self, replica: int, time: float) -> None:
        """Counts how long a replica was kept from starting, up to now."""
        since = self._idle_since.get(replica, time)
        self._idle_since[replica] = time
        self._held[replica] = self._held.get(replica, 0.0) + time - since

    def _end_computing(self, replica: int, local_step: int, time: float) -> int | None:
        """Notes that a gradient was computed; returns its staleness, or None if nobody is known to compute it."""
        self._check(replica)
        if local_step > self._step:
            raise ValueError(
                f"the gradient of replica {replica} is from the future. Received: local_step={local_step}, "
                f"step={self._step}"
            )
        computing = self._computing.get(replica)
        if computing is None or computing[0] != local_step:
            return None
        del self._computing[replica]
        self._idle_since[replica] = time
        self._measured(replica, time - computing[1])
        return self._step - local_step

    def _stepped_with(
        self,
        time: float,
        *,
        replicas: list[int],
        times: list[float],
        staleness: tuple[int, ...],
        weights: tuple[float, ...],
        numbers: list[int],
    ) -> Update:
        """Brings the books to the next step, after an update from the gradients of these replicas."""
        self._step += 1
        dropped, self._dropped = self._dropped, []
        self._surplus.clear()
        self._stepped()
        changes, self._changes = self._changes, []
        for replica in self._idle_since:
            self._hold(replica, time)
        held, self._held = self._held, {}
        update = Update(
            step=self._step,
            contributors=tuple(replicas),
            dropped=tuple(dropped),
            staleness=staleness,
            wait_secs=max(0.0, self._due_at - self._opened_at),
            spread_secs=max(times) - min(times),
            changes=tuple(changes),
            weights=weights,
            numbers=tuple(numbers),
            held_secs=tuple(held.get(replica, 0.0) for replica in range(self._total)),
        )
        self._opened_at = time
        return update

    def _fill(self) -> None:
        if self._limit is not None:
            free = [replica for replica in self._alive() if replica not in self._taking_part]
            self._taking_part.update(free[: max(0, self._limit - len(self._taking_part))])

    def _alive(self) -> list[int]:
        return [replica for replica in range(self._total) if replica not in self._lost]

    def _withdraw(self, replica: int) -> None:
        self._computing.pop(replica, None)
        self._idle_since.pop(replica, None)
        # Those that were not needed are needed now: nobody else could take its place.
        if self._accepted.pop(replica, None):
            self._surplus.clear()

    def _doing(self, replica: int) -> str:
        if replica in self._lost:
            return "is lost"
        if replica in self._computing:
            return f"is computing, since step {self._computing[replica][0]}"
        return "has arrived for this step"

    def _check(self, replica: int) -> None:
        if not 0 <= replica < self._total:
            raise ValueError(
                f"there is no such replica; they are 0 to {self._total - 1}. Received: replica={replica}"
                if self._total
                else f"{self!r} belongs to no strategy yet: call begin() first"
            )

    def _accepts(self, replica: int, local_step: int) -> bool:
        """Whether this gradient, which has just arrived from a replica that is alive, enters the update."""
        raise NotImplementedError

    def _measured(self, replica: int, secs: float) -> None:
        """Told how long a gradient took from start to arrival, whether or not it will be accepted."""

    def _stepped(self) -> None:
        """Told that an update was made; may add to `_changes`."""

    def _shrunk(self) -> None:
        """Told that a replica was lost; may add to `_changes`."""

    def _returned(self, replica: int) -> None:
        """Told that a replica is back, as if new."""
