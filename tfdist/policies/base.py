# SPDX-License-Identifier: Apache-2.0
"""Base classes of policies: `Policy`, and `Aggregation`, which decides which gradients form an update.

A policy touches no tensor, no clock, no log and no thread. The engine passes each event and its time to a method of the
policy, and the method returns a value (see `tfdist.policies.records`). So one policy object drives the engines, the
simulator and the tests.
"""

from __future__ import annotations

import collections
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from tfdist.policies.records import Arrival, Change, Computation, Contribution, Delivered, Outcome, Update

# Makes the place of the last durations of a replica.
_empty_window = functools.partial(collections.deque, maxlen=32)
# Overridable methods with an answer. Without it no gradient would be accepted, or an error would name neither.
_ANSWERS: dict[str, tuple[type, str]] = {
    "replicas_to_aggregate": (numbers.Integral, "the number of gradients of an update, an integer"),
    "accepts": (bool, "True or False"),
    "state": (dict, "a dict"),
    "updated": (Update, "the Update that super().updated(time) returns"),
}
# What else a user's class may override. A public method with nearly such a name is misspelt, except for `update`.
_OVERRIDABLE = (*_ANSWERS, "stepped", "shrunk", "lost", "check_replicas", "restore")

_DERIVE = "derive from BackupWorkers or tfdist.policies.Aggregation"


def _answering(of: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    kind, meaning = _ANSWERS[name]

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        # NumPy's, too.
        is_right = type(found).__name__ in ("bool", "bool_") if kind is bool else isinstance(found, kind)
        if not is_right:
            raise TypeError(f"{of.__name__}.{name} must return {meaning}. Received: {found!r}")
        return found

    return answer


class Policy:
    """Base class of the objects in a strategy's `policies=[...]`. One object belongs to one strategy."""

    # True for a class that is not of tfdist.
    _is_users = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_users = not cls.__module__.startswith("tfdist.")
        for name, given in list(vars(cls).items()) if cls._is_users else ():
            getter = given.fget if isinstance(given, property) else None
            is_method = getter or (callable(given) and not isinstance(given, type))
            inherited = getattr(super(cls, cls), name, None)
            owner = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
            if owner.__module__.startswith("tfdist.") and name[0] != "_" and name not in _OVERRIDABLE:
                hooks = ", ".join(_OVERRIDABLE)
                raise TypeError(f"{cls.__name__}.{name}: strategies ignore an override; rename it, or override {hooks}")
            if name in _OVERRIDABLE and inherited is None:
                raise TypeError(f"{cls.__name__}.{name}: of {cls.__mro__[1].__name__} no strategy calls it; {_DERIVE}")
            if is_method and getter is None and inherited is not None and not callable(inherited):
                raise TypeError(f"{cls.__name__}.{name} must be a property; write @property above it")
            if name in _OVERRIDABLE and callable(inherited) and inspect.isfunction(given):
                taken = inspect.signature(inherited).parameters
                try:
                    inspect.signature(given).bind(*taken)
                except TypeError:
                    raise TypeError(f"{cls.__name__}.{name} must take ({', '.join(taken)})") from None
            if name in _ANSWERS and getter is not None:
                setattr(cls, name, property(_answering(cls, name, getter)))
            elif name in _ANSWERS and callable(given):
                setattr(cls, name, _answering(cls, name, given))
            elif not is_method or inherited is not None or name.startswith("_") or name == "update":
                continue
            elif (close := difflib.get_close_matches(name, _OVERRIDABLE, 1, 0.85)) and close[0] not in vars(cls):
                raise TypeError(f"{cls.__name__}.{name}: no strategy calls it; did you mean {close[0]}? Else rename it")

    def __init__(self) -> None:
        self._strategy = ""
        self._total = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def check_made(self) -> None:
        """Raises TypeError if the constructor of a user's class has not called that of its base, or hides a method."""
        if "_total" not in vars(self):
            raise TypeError(f"{type(self).__name__}.__init__ must begin with super().__init__(...)")
        for name, value in vars(self).items() if self._is_users else ():
            kind = "a method" if inspect.isfunction(inspect.getattr_static(type(self), name, None)) else ""
            kind = kind or "of Aggregation" * (name == "durations" and not isinstance(value, collections.defaultdict))
            if kind:
                raise TypeError(f"{type(self).__name__}.{name} is {kind}, which an attribute hides; rename that one")

    def begin(self, total_num_replicas: int, strategy: str) -> None:
        """Binds this policy to a strategy. Called once, by the constructor of the strategy.

        Args:
          total_num_replicas: how many replicas compute gradients.
          strategy: the strategy's name, for messages.

        Raises:
          ValueError: the policy makes no sense with this number.
          RuntimeError: the policy belongs to another strategy already.
        """
        self.check_made()
        if self._total:
            raise RuntimeError(
                f"{self!r} is a policy of another strategy already ({self._strategy} with {self._total} replicas); one "
                f"policy object belongs to one strategy. Give {strategy} a new one."
            )
        if total_num_replicas < 1:
            raise ValueError(f"{strategy} has no replica. Received: total_num_replicas={total_num_replicas}")
        self.check_replicas(total_num_replicas, strategy)
        self._total = total_num_replicas
        self._strategy = strategy

    @property
    def total_num_replicas(self) -> int:
        """Number of replicas, dead or alive; 0 before `begin`."""
        return self._total

    def state(self) -> dict[str, Any]:
        """Returns the policy's state for a checkpoint, as JSON data; {} unless a subclass has state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`. Called between two updates."""

    def check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """Raises ValueError if the policy makes no sense with so many replicas."""


class Aggregation(Policy):
    """Decides which gradients form an update.

    Replicas are the integers 0 to total_num_replicas - 1, and times are seconds on one monotonic clock. The caller
    holds a lock around each call. It keeps the lock from reading `update_due` until `updated` has returned, because a
    replica lost in between withdraws its gradient.

    A policy of your own is a subclass, of this class or of `BackupWorkers`. It implements `replicas_to_aggregate`, and
    may override `accepts`, `stepped`, `shrunk`, `check_replicas`, `state`, `restore` and, calling the inherited method,
    `updated` and `lost`. It may read `durations`, `alive()` and all properties.

    Attributes:
      durations: of each replica the seconds from start to arrival of its last 32 gradients, accepted or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        self._lost: set[int] = set()
        self._computing: dict[int, Computation] = {}
        # Replicas that have started at least once, ordered by their last start.
        self._started: dict[int, None] = {}
        # Gradients accepted for this step's update, in the order of arrival.
        self._accepted: dict[int, Delivered] = {}
        # Replicas whose gradient was of this step, and was dropped: the spares of the step.
        self._surplus: set[int] = set()
        self.durations = collections.defaultdict[int, collections.deque[float]](_empty_window)
        self._opened_at = 0.0
        self._due_at = 0.0
        # Gradients dropped or lost since the last update.
        self._ended: list[Contribution] = []
        self._changes: list[Change] = []
        self._number = 0
        # Number of replicas that take part, None for all; their indices.
        self._limit: int | None = None
        self._taking_part: set[int] = set()
        # When each idle replica has delivered its last gradient, later by the time in which no update was wanted.
        self._idle_since: dict[int, float] = {}

    def begin(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.begin`."""
        super().begin(total_num_replicas, strategy)
        try:
            self._check_needed()
        except ValueError:
            self._total = 0
            raise

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients that the current step's update needs."""
        raise NotImplementedError(f"{type(self).__name__}.replicas_to_aggregate must return a number of gradients")

    @property
    def is_synchronous(self) -> bool:
        """True if replicas start a gradient only when Keras asks for an update."""
        return True

    @property
    def is_weighted(self) -> bool:
        """True if gradients may have weights other than 1."""
        return False

    @property
    def may_any_start(self) -> bool:
        """False if no replica may start, which is known without a call of `may_start` for each."""
        return True

    @property
    def step(self) -> int:
        """Global step: the number of updates so far."""
        return self._step

    @property
    def update_due(self) -> bool:
        """True if enough gradients were accepted for the current step's update."""
        return self._total > 0 and len(self._accepted) >= self.replicas_to_aggregate

    @property
    def contributors(self) -> tuple[int, ...]:
        """Replicas whose gradients were accepted for the current step's update, in the order of arrival."""
        return tuple(self._accepted)

    def opened(self, time: float) -> None:
        """Notes that Keras asked for the update of this step; `Update.wait_secs` counts from this time.

        Replicas may start before, as soon as the previous update was made. An engine that must not compute ahead
        calls `may_start` only after Keras has asked.
        """
        if (unwanted_secs := time - self._opened_at) > 0:
            for each, since in self._idle_since.items():
                self._idle_since[each] = min(time, since + unwanted_secs)
        self._opened_at = time
        if self._is_users:
            # Not before: a policy may know nothing of a step that is never made.
            self._check_needed()

    def limit(self, count: int) -> None:
        """Lets only `count` of the living replicas take part from now on.

        Replicas that take part already stay; the lowest free indices fill the rest. If one is lost, another replica
        takes its place, and keeps it when the lost one returns.
        """
        self._limit = count
        self._fill()

    def takes_part(self, replica: int) -> bool:
        """Returns True if `replica` is alive and within the limit set by `limit`."""
        self._check(replica)
        return replica not in self._lost and (self._limit is None or replica in self._taking_part)

    def may_start(self, replica: int) -> bool:
        """Returns True if `replica` takes part, computes no gradient, and has delivered none for this step.

        If the policy is synchronous, only `updated`, `lost`, `recovered`, `withdraw`, `limit` and the replica's own
        events turn the answer from False to True.
        """
        self._check(replica)
        return not self._hindrance(replica)

    @property
    def turns(self) -> tuple[int, ...]:
        """All replicas by priority for the next start: the one whose last start is longest ago is first."""
        new = (replica for replica in range(self._total) if replica not in self._started)
        return *new, *self._started

    def started(self, replica: int, time: float) -> int:
        """Notes that `replica` starts to compute a gradient.

        Returns:
          The local step of the gradient: the global step whose variables it is computed from.

        Raises:
          RuntimeError: the replica may not start.
        """
        local_step = self.start(replica, time)
        if local_step is None:
            hindrance = self._hindrance(replica)
            raise RuntimeError(f"replica {replica} may not start in step {self._step}: it {hindrance}")
        return local_step

    def start(self, replica: int, time: float) -> int | None:
        """`started` if `replica` may start, else None: one event for a replica that asks and starts at once."""
        if not 0 <= replica < self._total:
            self._check(replica)
        # `_hindrance`, without a call: each replica asks at each step.
        takes_part = replica not in self._lost and (self._limit is None or replica in self._taking_part)
        if not takes_part or replica in self._computing or replica in self._accepted or replica in self._surplus:
            return None
        self._started.pop(replica, None)
        self._started[replica] = None
        held_secs = time - self._idle_since.pop(replica, time)
        self._computing[replica] = Computation(replica, self._step, time, held_secs)
        return self._step

    def started_late(self, replica: int, local_step: int, time: float) -> None:
        """Notes that `replica` computes a gradient of a step that is over, which it could not know; it is dropped."""
        if self.takes_part(replica) and replica not in self._computing:
            held_secs = time - self._idle_since.pop(replica, time)
            self._computing[replica] = Computation(replica, local_step, time, held_secs)

    def arrived(
        self, replica: int, local_step: int, time: float, input_secs: float = 0.0, start: float | None = None
    ) -> Arrival:
        """Accepts or drops the gradient of `replica`, which was computed from the variables of `local_step`.

        Accepted are the first ones of the current step that `accepts` takes, and those without which the update can't
        be made. A gradient whose start is unknown is dropped: its replica was lost in the meantime.

        Args:
          replica: index of the replica.
          local_step: local step of the gradient.
          time: time of the arrival.
          input_secs: time for which the replica waited for its batch; 0 if unknown.
          start: time of the start of the gradient, if the event of the start was late.
        """
        staleness, needed = self._step - local_step, self.replicas_to_aggregate
        computation = self._end_computing(replica, local_step, time, input_secs, start)
        is_open = staleness == 0 and len(self._accepted) < needed
        if (
            computation is None
            or not is_open
            or not (self.accepts(replica, time - computation.start) or self._needs(replica))
        ):
            self._drop(computation, time)
            if computation and staleness == 0:
                self._surplus.add(replica)
            return Arrival(False, staleness, 0.0)
        self._accepted[replica] = Delivered(local_step, self._number, computation, time)
        self._number += 1
        if len(self._accepted) >= needed:
            self._due_at = time
        return Arrival(True, staleness, 1.0, self._number - 1)

    def updated(self, time: float) -> Update:
        """Notes that the update that was due has been made, and increments the global step.

        Raises:
          RuntimeError: no update was due.
        """
        if not self._total or len(self._accepted) < self.replicas_to_aggregate:
            raise RuntimeError(
                f"no update was due in step {self._step}: it has {len(self._accepted)} of "
                f"{self.replicas_to_aggregate if self._total else 'unknown'} gradients"
            )
        # `Delivered.ended`, without two calls for each.
        ended, numbers = [], []
        for _, number, of, arrival in self._accepted.values():
            staleness = self._step - of.local_step
            ended.append(
                Contribution(of.replica, of.start, arrival, Outcome.ACCEPTED, staleness, 1.0, of.held, of.input)
            )
            numbers.append(number)
        self._accepted = {}
        return self._stepped_with(time, ended, numbers)

    def lost(self, replica: int, time: float) -> None:
        """Notes that `replica` died, and withdraws its gradient from this step's update.

        The gradient is withdrawn because the replica may have died while pushing it.
        """
        self._check(replica)
        was_due = self.update_due
        self._lost.add(replica)
        self._taking_part.discard(replica)
        self._withdraw(replica, time, Outcome.LOST)
        self._fill()
        self.shrunk()
        if not self.update_due:
            # A gradient that `accepts` has dropped may be needed now.
            self._surplus.clear()
        elif not was_due:
            self._due_at = time

    def recovered(self, replica: int, time: float) -> None:
        """Notes that `replica` was restarted. It begins like a new replica."""
        self._check(replica)
        # The replica may have died and returned before its loss was detected.
        self._withdraw(replica, time, Outcome.LOST)
        self._lost.discard(replica)
        self._fill()
        self.durations.pop(replica, None)

    def is_computing(self, replica: int, local_step: int) -> bool:
        """Returns True if `replica` has started a gradient for `local_step` that was not withdrawn."""
        self._check(replica)
        computing = self._computing.get(replica)
        return computing is not None and computing.local_step == local_step

    def withdraw(self, replica: int, time: float | None = None) -> None:
        """Withdraws the gradient that `replica` computes or has delivered for this step; it may start again.

        In `Update.contributions` it is a dropped one, which ends at `time` (its start if not given) or at its arrival.
        """
        self._check(replica)
        computation = self._computing.get(replica)
        self._withdraw(replica, computation.start if computation and time is None else time or 0.0, Outcome.DROPPED)

    def found_no_data(self, replica: int) -> None:
        """Notes that the data had ended when `replica` started: it computes no gradient, and none is dropped."""
        self._check(replica)
        self._withdraw(replica, 0.0, None)

    def is_spare(self, replica: int) -> bool:
        """Returns True if the gradient of `replica` for this step was dropped, so that it waits for the next step."""
        return replica in self._surplus

    def missing(self) -> tuple[int, ...]:
        """Returns the lost replicas if too few are alive for an update, else ()."""
        enough = self._total - len(self._lost) >= self.replicas_to_aggregate
        return () if enough else tuple(sorted(self._lost))

    def _needs(self, replica: int) -> bool:
        """Returns True if the update of this step can't be made without the gradient that `replica` has computed."""
        heard = {replica, *self._accepted, *self._surplus}
        others = sum(self.takes_part(each) for each in range(self._total) if each not in heard)
        return len(self._accepted) + others < self.replicas_to_aggregate

    def _drop(self, computation: Computation | None, time: float) -> None:
        """Counts a gradient as dropped. One without a known start was counted when it was withdrawn or lost."""
        if computation:
            self._ended.append(computation.ended(time, self._step, Outcome.DROPPED))

    def _end_computing(
        self, replica: int, local_step: int, time: float, input_secs: float, start: float | None
    ) -> Computation | None:
        """Notes that a gradient was computed; returns its computation, or None if its start is unknown."""
        if not 0 <= replica < self._total:
            self._check(replica)
        if local_step > self._step:
            raise ValueError(
                f"the gradient of replica {replica} is from the future. Received: local_step={local_step}, "
                f"step={self._step}"
            )
        computation = self._computing.get(replica)
        if computation is None or computation.local_step != local_step:
            return None
        del self._computing[replica]
        self._idle_since[replica] = time
        if start is not None:
            # The time until the event was counted as held back.
            held_secs = max(0.0, computation.held - max(0.0, computation.start - start))
            computation = computation._replace(start=start, held=held_secs)
        self.durations[replica].append(time - computation.start)
        return computation._replace(input=input_secs) if input_secs else computation

    def _stepped_with(self, time: float, accepted: list[Contribution], numbers: list[int]) -> Update:
        """Increments the global step and resets the counts of the step; returns the `Update` of these gradients."""
        self._step += 1
        ended, self._ended = self._ended, []
        self._surplus.clear()
        self.stepped()
        changes, self._changes = self._changes, []
        # Without a call for each: this is on the way of every step.
        replicas, _, arrivals, _, staleness, weights, *_ = zip(*accepted, strict=True)
        update = Update(
            step=self._step,
            contributors=replicas,
            dropped=tuple([each.replica for each in ended if each.outcome is Outcome.DROPPED]) if ended else (),
            staleness=staleness,
            wait_secs=max(0.0, self._due_at - self._opened_at),
            spread_secs=max(arrivals) - min(arrivals),
            changes=tuple(changes),
            weights=weights,
            numbers=tuple(numbers),
            contributions=(*ended, *accepted),
            time=time,
            opened_secs=max(0.0, time - self._opened_at),
        )
        self._opened_at = time
        return update

    def _check_needed(self) -> None:
        """Raises ValueError for an update that no number of arrivals would make; it would be waited for."""
        if not 1 <= (needed := self.replicas_to_aggregate) <= self._total:
            number = f"replicas_to_aggregate must be 1 to {self._total}, the replicas"
            raise ValueError(f"{self!r}: {number}, in each step. Received: {needed} in step {self._step}")

    def _fill(self) -> None:
        if self._limit is not None:
            free = [replica for replica in self.alive() if replica not in self._taking_part]
            self._taking_part.update(free[: max(0, self._limit - len(self._taking_part))])

    def alive(self) -> list[int]:
        """Returns the replicas that are not lost."""
        return [replica for replica in range(self._total) if replica not in self._lost]

    def _withdraw(self, replica: int, time: float, outcome: Outcome | None) -> None:
        self._stop(replica, time, outcome)
        # Replicas whose gradient was surplus may start again: one of them must replace the withdrawn gradient.
        if accepted := self._accepted.pop(replica, None):
            if outcome is not None:
                self._ended.append(accepted.ended(self._step, outcome))
            self._surplus.clear()

    def _stop(self, replica: int, time: float, outcome: Outcome | None) -> Computation | None:
        """Withdraws the gradient that `replica` computes, if any, and returns it; it is no gradient without outcome."""
        self._idle_since.pop(replica, None)
        computation = self._computing.pop(replica, None)
        if computation and outcome is not None:
            self._ended.append(computation.ended(time, self._step, outcome))
        return computation

    def _hindrance(self, replica: int) -> str:
        """Returns the reason for which a replica may not start a gradient; "" if it may."""
        if replica in self._lost:
            return "is lost"
        if replica in self._computing:
            return f"is computing, since step {self._computing[replica].local_step}"
        if replica in self._accepted or replica in self._surplus:
            return "has arrived for this step"
        return "" if self._limit is None or replica in self._taking_part else "takes no part"

    def _check(self, replica: int) -> None:
        if not 0 <= replica < self._total:
            raise ValueError(
                f"there is no such replica; they are 0 to {self._total - 1}. Received: replica={replica}"
                if self._total
                else f"{self!r} belongs to no strategy yet: call begin() first"
            )

    # For subclasses.

    def accepts(self, replica: int, secs: float) -> bool:
        """Returns False to drop the gradient of a replica, which is a spare of the current step then.

        Called for the gradients of the step until its update has enough. A gradient is accepted anyway if the other
        replicas are too few for the update.

        Args:
          replica: the replica that computed it.
          secs: from its start to its arrival.
        """
        del replica, secs
        return True

    def changed(self, text: str) -> None:
        """Notes a change of this policy's settings, which the next `Update` has and the log shows."""
        self._changes.append(Change(text))

    def stepped(self) -> None:
        """Called after each update."""

    def shrunk(self) -> None:
        """Called after the loss of a replica."""
