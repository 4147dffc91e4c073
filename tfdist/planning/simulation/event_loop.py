# SPDX-License-Identifier: Apache-2.0
"""Event loop of the simulator: the real policy decides, and links and replicas take simulated time.

    start   the policy lets a replica start     ->  variables queue on the link from the servers
    receive the variables have arrived          ->  the replica computes
    compute the gradient is computed            ->  it queues on the link to the servers
    arrive  the policy accepts or drops it      ->  if an update is due, it is made; others may start

Without links (engines whose replicas have variables of their own) a gradient arrives when it is computed. The update
then takes the time of the collective. No event costs more than O(log N) for N replicas, apart from an update or loss
under a synchronous policy, which concerns all of them.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

from tfdist.planning.simulation.result import GradientRecord
from tfdist.policies import base
from tfdist.policies.warmup import Warmup

_ARRIVED, _COMPUTED, _APPLIED, _FAILED, _RETURNED = range(5)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time that an engine takes besides computing.

    Attributes:
      down: link from the parameter servers; None without one.
      up: link to the parameter servers; None without one.
      down_bytes: bytes that a replica fetches before each gradient.
      up_bytes: bytes of a gradient.
      gradient_secs: latency and encoding, added to each gradient.
      update_secs: from the last gradient of an update until replicas may start; takes the number that take part.
      join_secs: broadcast of the state to replicas that join after a warmup phase; takes the number that take part.
      needs_all: True if no update is made while a replica is lost, because a collective needs all.
    """

    down: Link | None = None
    up: Link | None = None
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    gradient_secs: float = 0.0
    update_secs: Callable[[int], float] = lambda count: 0.0
    join_secs: Callable[[int], float] = lambda count: 0.0
    needs_all: bool = False


class EventLoop:
    """One run of the simulator.

    Args:
      policy: decides; `begin` was called.
      durations: seconds of computing by replica and attempt.
      costs: what else takes time.
      warmup: limits the replicas that take part at the start.
      steps_per_epoch: updates of an epoch; 0 if there are no epochs.
      ends_epochs: True if an epoch starts as many gradients as it has updates, and the next begins when all are
        applied. Only for policies that make an update of each gradient.
      losses: (time, replica, seconds until it is back or None) of each loss of a replica.

    Attributes:
      time: simulated time.
      updates: updates so far.
      times: time of each update.
      gradients: record of each gradient.
      held_secs: time for which the policy held each replica back.
      busy_secs: time spent in updates.
    """

    def __init__(
        self,
        policy: base.Aggregation,
        durations: Callable[[int, int], float],
        costs: Costs = Costs(),
        *,
        warmup: Warmup | None = None,
        steps_per_epoch: int = 0,
        ends_epochs: bool = False,
        losses: Sequence[tuple[float, int, float | None]] = (),
    ) -> None:
        total = policy.total_num_replicas
        self.time = 0.0
        self.updates: list[base.Update] = []
        self.times = array.array("d")
        self.gradients: list[GradientRecord] = []
        self.held_secs = [0.0] * total
        self.busy_secs = 0.0
        self._policy = policy
        self._durations = durations
        self._costs = costs
        self._warmup = warmup
        self._steps_per_epoch = steps_per_epoch
        self._ends_epochs = ends_epochs and steps_per_epoch > 0
        # Gradients of this epoch that were not started yet.
        self._left_in_epoch: float = steps_per_epoch if self._ends_epochs else math.inf
        self._losses = losses
        # (time, replica, kind, gradient): of events at the same time, that of the lowest replica is first.
        self._events: list[tuple[float, int, int, int]] = []
        self._links = [link for link in (costs.down, costs.up) if link is not None]
        self._attempts = [0] * total
        self._idle_since = [0.0] * total
        # Gradient of each replica that is under way; -1 for none.
        self._under_way = [-1] * total
        # Idle replicas: (last gradient, replica); gradients are numbered in the order of their starts. Replicas that
        # the policy refused are tried again later.
        self._idle = [(replica - total, replica) for replica in range(total)]
        self._refused: list[tuple[int, int]] = []
        # Gradients of each replica that ended, and whose outcome the policy tells with the next update.
        self._ended: list[list[GradientRecord]] = [[] for _ in range(total)]
        self._is_updating = False
        self._lost: set[int] = set()
        self._taking_part = total
        # How many updates so many replicas took part in.
        self.taking_part = collections.Counter[int]()

    def run(self, num_updates: int) -> None:
        """Runs until `num_updates` updates were made.

        Raises:
          RuntimeError: no replica can start, and no update is due.
        """
        for index, (time, replica, _) in enumerate(self._losses):
            heapq.heappush(self._events, (time, replica, _FAILED, index))
        if self._warmup is not None:
            self._limit(self._warmup.opened(True))
        self._open(0.0)
        handlers = (self._arrive, self._send, self._apply, self._lose, self._bring_back)
        events, links = self._events, self._links
        while len(self.updates) < num_updates:
            time, first = events[0][0] if events else math.inf, None
            for link in links:
                if link.next < time:
                    time, first = link.next, link
            if first is not None:
                self.time = time
                self._leave(first, time)
            elif events:
                self.time, replica, kind, gradient = heapq.heappop(events)
                handlers[kind](self.time, replica, gradient)
            else:
                lost = f"; lost for good: {', '.join(map(str, sorted(self._lost)))}" if self._lost else ""
                text = f"lets no replica start in step {self._policy.step}, and no update is due"
                raise RuntimeError(f"{self._policy!r} {text}{lost}")

    # Replicas.

    def _start_idle(self, time: float) -> None:
        """Lets idle replicas start, that whose last start is longest ago first."""
        policy, idle = self._policy, self._idle
        while idle and not self._is_updating and self._left_in_epoch > 0 and policy.may_any_start:
            entry = heapq.heappop(idle)
            if policy.may_start(entry[1]):
                self._start(time, entry[1])
            else:
                self._refused.append(entry)

    def _try_refused(self) -> None:
        while self._refused:
            heapq.heappush(self._idle, self._refused.pop())

    def _start(self, time: float, replica: int) -> None:
        gradient = len(self.gradients)
        local_step = self._policy.started(replica, time)
        self.gradients.append(GradientRecord(replica, time, time, time, time, local_step))
        self.held_secs[replica] += time - self._idle_since[replica]
        self._under_way[replica] = gradient
        self._left_in_epoch -= 1
        if self._costs.down is None:
            self._compute(time, replica, gradient)
        else:
            self._costs.down.enter(time, self._costs.down_bytes, gradient)

    def _compute(self, time: float, replica: int, gradient: int) -> None:
        attempt = self._attempts[replica]
        self._attempts[replica] = attempt + 1
        end = time + self._durations(replica, attempt) + self._costs.gradient_secs
        record = self.gradients[gradient]
        record.received, record.computed = time, end
        heapq.heappush(self._events, (end, replica, _ARRIVED if self._costs.up is None else _COMPUTED, gradient))

    def _send(self, time: float, replica: int, gradient: int) -> None:
        if self._costs.up is not None and self._under_way[replica] == gradient:
            self._costs.up.enter(time, self._costs.up_bytes, gradient)

    def _leave(self, link: Link, time: float) -> None:
        gradient = link.leave()
        replica = self.gradients[gradient].replica
        if self._under_way[replica] != gradient:
            return
        if link is self._costs.down:
            self._compute(time, replica, gradient)
        else:
            self._arrive(time, replica, gradient)

    def _arrive(self, time: float, replica: int, gradient: int) -> None:
        if self._under_way[replica] != gradient:
            return
        self._policy.arrived(replica, self.gradients[gradient].local_step, time)
        self._end(gradient, replica, time)
        heapq.heappush(self._idle, (gradient, replica))
        if self._policy.update_due and not self._is_updating:
            self._update(time)
        else:
            self._start_idle(time)

    def _end(self, gradient: int, replica: int, time: float) -> None:
        record = self.gradients[gradient]
        record.arrived = time
        self._ended[replica].append(record)
        self._under_way[replica] = -1
        self._idle_since[replica] = time

    # Updates.

    def _update(self, time: float) -> None:
        policy = self._policy
        while policy.update_due and not self._is_updating and not (self._costs.needs_all and self._lost):
            taking_part = self._taking_part
            self.taking_part[taking_part] += 1
            self._record(policy.updated(time), time)
            self._try_refused()
            secs = self._costs.update_secs(taking_part) + self._open_next()
            if secs > 0:
                self._is_updating = True
                self.busy_secs += secs
                heapq.heappush(self._events, (time + secs, -1, _APPLIED, -1))
            else:
                self._open(time)

    def _apply(self, time: float, replica: int, gradient: int) -> None:
        del replica, gradient
        self._is_updating = False
        self._open(time)
        self._update(time)

    def _open(self, time: float) -> None:
        self._policy.opened(time)
        if self._ends_epochs and len(self.updates) % self._steps_per_epoch == 0:
            self._left_in_epoch = self._steps_per_epoch
        self._start_idle(time)

    def _open_next(self) -> float:
        """Counts the next update in the warmup phase; returns the seconds that joining replicas take."""
        if self._warmup is None:
            return 0.0
        is_first = self._steps_per_epoch > 0 and len(self.updates) % self._steps_per_epoch == 0
        before = self._taking_part
        self._limit(self._warmup.opened(is_first))
        return self._costs.join_secs(self._taking_part) if self._taking_part > before else 0.0

    def _limit(self, count: int) -> None:
        if count != self._taking_part:
            self._taking_part = count
            self._policy.limit(count)
            self._try_refused()

    def _record(self, update: base.Update, time: float) -> None:
        self.updates.append(update)
        self.times.append(time)
        for each in update.contributions:
            ended, times = self._ended[each.replica], (each.start, each.arrival)
            record = ended.pop(next(i for i, own in enumerate(ended) if (own.started, own.arrived) == times))
            record.outcome = each.outcome.name.lower()
            if each.outcome != base.Outcome.LOST:
                record.staleness = each.staleness
            if each.outcome == base.Outcome.ACCEPTED:
                record.update = update.step

    # Losses.

    def _lose(self, time: float, replica: int, known: int) -> None:
        back_after = self._losses[known][2]
        if replica in self._lost:
            return
        self._lost.add(replica)
        self._policy.lost(replica, time)
        gradient = self._under_way[replica]
        if gradient >= 0:
            self._end(gradient, replica, time)
            # The lost worker's step is given to another worker.
            self._left_in_epoch += 1
            self._refused.append((gradient, replica))
        if back_after is not None:
            heapq.heappush(self._events, (time + back_after, replica, _RETURNED, known))
        self._changed(time)

    def _bring_back(self, time: float, replica: int, known: int) -> None:
        self._lost.discard(replica)
        self._policy.recovered(replica, time)
        self._idle_since[replica] = time
        self._changed(time)

    def _changed(self, time: float) -> None:
        self._try_refused()
        self._start_idle(time)
        self._update(time)


# Links on which transfers queue. The cost of an event does not depend on the number of transfers.


class Link:
    """A link that all transfers share at once and equally, as TCP connections do (processor sharing).

    A virtual clock runs at the rate of one transfer, so that a transfer ends when the clock has advanced by its bytes.
    All transfers of a link have one size, so they end in the order of their beginnings.

    Args:
      capacity: bytes per second of all transfers together.
      most_per_transfer: bytes per second of one transfer at most, because of the link at its other end.

    Attributes:
      next: time at which the next transfer ends; infinite if there is none.
      bytes_sent: bytes of all transfers so far.
    """

    def __init__(self, capacity: float, most_per_transfer: float = math.inf) -> None:
        self.capacity = capacity
        self._most = min(capacity, most_per_transfer)
        self.next = math.inf
        self.bytes_sent = 0.0
        self._clock = 0.0
        self._last = 0.0
        # (virtual end, owner) of each transfer.
        self._transfers: collections.deque[tuple[float, int]] = collections.deque()

    def enter(self, time: float, size: float, owner: int) -> None:
        """Begins a transfer of `size` bytes."""
        if self._transfers:
            share = self.capacity / len(self._transfers)
            self._clock += (time - self._last) * (share if share < self._most else self._most)
        else:
            self._clock = 0.0
        self._last = time
        self._transfers.append((self._clock + size, owner))
        self.bytes_sent += size
        self._schedule(time)

    def leave(self) -> int:
        """Ends the transfer that ends at `next`; returns its owner."""
        self._last = self.next
        self._clock, owner = self._transfers.popleft()
        self._schedule(self._last)
        return owner

    def _schedule(self, time: float) -> None:
        if not self._transfers:
            self.next = math.inf
            return
        left = self._transfers[0][0] - self._clock
        share = self.capacity / len(self._transfers)
        self.next = time + left / (share if share < self._most else self._most) if left > 0.0 else time


class FifoLink(Link):
    """A link that serves one transfer after another, in the order of their beginnings."""

    def enter(self, time: float, size: float, owner: int) -> None:
        """See `Link.enter`."""
        # The link is free again when the last byte has left; the other end may take longer to receive it. What it
        # receives stays in order.
        self._clock = max(self._clock, time) + size / self.capacity
        self._last = max(self._last, self._clock, time + size / self._most)
        self._transfers.append((self._last, owner))
        self.bytes_sent += size
        self.next = self._transfers[0][0]

    def leave(self) -> int:
        """See `Link.leave`."""
        owner = self._transfers.popleft()[1]
        self.next = self._transfers[0][0] if self._transfers else math.inf
        return owner


# Closed forms of communication costs, without queueing: the time of one exchange among p participants.


def ring_all_reduce_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns 2 (p - 1) a + 2 (p - 1) / p n / B, the time of a ring all-reduce of n bytes.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.

    Args:
      size: n, bytes.
      participants: p.
      bandwidth: B, bytes per second of each link, in each direction.
      latency_secs: a, of one message.
    """
    others = participants - 1
    return 2 * others * latency_secs + 2 * others / participants * size / bandwidth if others else 0.0


def ring_all_gather_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns (p - 1) (a + n / B), the time until each of p participants has the n bytes of all others."""
    return (participants - 1) * (latency_secs + size / bandwidth)


def broadcast_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns ceil(log2 p) (a + n / B), the time of a binomial-tree broadcast of n bytes to p - 1 others."""
    return (participants - 1).bit_length() * (latency_secs + size / bandwidth)
