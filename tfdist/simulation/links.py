# SPDX-License-Identifier: Apache-2.0
"""Links on which transfers queue. Each event costs O(log n) for n transfers on the link."""

from __future__ import annotations

import heapq
import math


class Link:
    """A link that all transfers share at once and equally, as TCP connections do (processor sharing).

    A virtual clock runs at the rate of one transfer, so that a transfer ends when the clock has advanced by its bytes.

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
        # Virtual end, number of the transfer, its owner.
        self._transfers: list[tuple[float, int, int]] = []
        self._count = 0

    def enter(self, time: float, size: float, owner: int) -> None:
        """Begins a transfer of `size` bytes."""
        transfers = self._transfers
        if transfers:
            self._clock += (time - self._last) * self._rate()
        else:
            self._clock = 0.0
        self._last = time
        heapq.heappush(transfers, (self._clock + size, self._count, owner))
        self._count += 1
        self.bytes_sent += size
        self._schedule(time)

    def leave(self) -> int:
        """Ends the transfer that ends at `next`; returns its owner."""
        time = self.next
        self._clock, _, owner = heapq.heappop(self._transfers)
        self._last = time
        self._schedule(time)
        return owner

    def _rate(self) -> float:
        return min(self._most, self.capacity / len(self._transfers))

    def _schedule(self, time: float) -> None:
        transfers = self._transfers
        self.next = time + max(0.0, transfers[0][0] - self._clock) / self._rate() if transfers else math.inf


class FifoLink(Link):
    """A link that serves one transfer after another, in the order of their beginnings."""

    def enter(self, time: float, size: float, owner: int) -> None:
        """See `Link.enter`."""
        # The link is free again when the last byte has left; the other end may take longer to receive it.
        self._clock = max(self._clock, time) + size / self.capacity
        end = max(self._clock, time + size / self._most)
        heapq.heappush(self._transfers, (end, self._count, owner))
        self._count += 1
        self.bytes_sent += size
        self.next = self._transfers[0][0]

    def leave(self) -> int:
        """See `Link.leave`."""
        owner = heapq.heappop(self._transfers)[2]
        self.next = self._transfers[0][0] if self._transfers else math.inf
        return owner
