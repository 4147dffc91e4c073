# SPDX-License-Identifier: Apache-2.0
"""Links on which transfers queue. The cost of an event does not depend on the number of transfers."""

from __future__ import annotations

import collections
import math


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
