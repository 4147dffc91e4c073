# SPDX-License-Identifier: Apache-2.0
"""Batches, or parts of them, for workers that go on by themselves instead of step by step.

    Shares    data cut into shares beforehand: a worker reads its own, and then one that nobody reads (its worker was
              lost, or does not take part yet), from where that one was left
    Streams   each worker has an iterator of its own, and reads it to its end
    Parts     the chief reads the data, and a worker asks for the next part

All three are asked in the workers' threads on the chief. A part that was taken and not used, because its worker was
lost, is given out again; so each is used once.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Feed:
    """Interface of all three; each call is about one worker.

    Attributes:
      from_chief: whether `take` gives a batch rather than an iterator on the worker.
    """

    from_chief = False

    def arrive(self, worker: int, iterator: Any) -> None:
        """Says that `worker` is there, with an iterator of its own if each has one."""

    def take(self, worker: int) -> Any | None:
        """The source of the next contribution of `worker`; None at the end."""
        raise NotImplementedError

    def used(self, worker: int) -> None:
        """Says that a contribution was made of what `worker` took."""

    def ended(self, worker: int) -> None:
        """Says that the iterator that was given to `worker` is at its end."""

    def has_more(self, worker: int) -> bool:
        """True if `take` has something for `worker`, as far as is known."""
        raise NotImplementedError

    def release(self, worker: int) -> None:
        """Says that `worker` was lost."""


class Streams(Feed):
    """An iterator on each worker.

    Args:
      used: told of each contribution, so that a worker that comes back leaves out what it has used.
    """

    def __init__(self, used: Callable[[int], None] = lambda worker: None) -> None:
        self._used = used
        self._lock = threading.Lock()
        self._iterators: dict[int, Any] = {}
        self._at_end: set[int] = set()

    def arrive(self, worker: int, iterator: Any) -> None:
        """Says that `worker` is there, with an iterator of its own."""
        with self._lock:
            self._iterators[worker] = iterator

    def take(self, worker: int) -> Any | None:
        """The iterator with the next batch of `worker`; None at the end."""
        with self._lock:
            return None if worker in self._at_end else self._iterators[worker]

    def used(self, worker: int) -> None:
        """Says that a contribution was made of what `worker` took."""
        self._used(worker)

    def ended(self, worker: int) -> None:
        """Says that what was given to `worker` is at its end."""
        with self._lock:
            self._at_end.add(worker)

    def has_more(self, worker: int) -> bool:
        """True if `take` has something for `worker`."""
        with self._lock:
            return worker not in self._at_end


class Shares(Feed):
    """Shares of the data, each read by one worker at a time.

    Args:
      count: how many shares there are, one for each worker.
      open_share: makes an iterator over share `share` without its first `position` parts, on the worker of this thread.
      forget: told of a worker that was lost, with the iterators on it.
    """

    def __init__(
        self, count: int, open_share: Callable[[int, int], Any], forget: Callable[[int], None] = lambda worker: None
    ) -> None:
        self._open_share = open_share
        self._forget = forget
        self._lock = threading.Lock()
        self._free = set(range(count))
        self._positions = [0] * count
        # Worker -> its share, and the iterator over it.
        self._held: dict[int, int] = {}
        self._iterators: dict[int, Any] = {}

    def take(self, worker: int) -> Any | None:
        """The iterator over the share of `worker`; None if nobody needs it any more."""
        with self._lock:
            if worker not in self._held:
                if not self._free:
                    return None
                share = worker if worker in self._free else min(self._free)
                self._free.discard(share)
                self._held[worker] = share
            share = self._held[worker]
        if worker not in self._iterators:
            # Only this worker's thread comes here for it.
            self._iterators[worker] = self._open_share(share, self._positions[share])
        return self._iterators[worker]

    def used(self, worker: int) -> None:
        """Says that a contribution was made of what `worker` took."""
        with self._lock:
            if worker in self._held:
                self._positions[self._held[worker]] += 1

    def ended(self, worker: int) -> None:
        """Says that the share of `worker` is at its end."""
        with self._lock:
            self._held.pop(worker, None)
            self._iterators.pop(worker, None)

    def has_more(self, worker: int) -> bool:
        """True if `take` has something for `worker`."""
        with self._lock:
            return worker in self._held or bool(self._free)

    def release(self, worker: int) -> None:
        """Says that `worker` was lost: another one may go on with its share."""
        with self._lock:
            if (share := self._held.pop(worker, None)) is not None:
                self._free.add(share)
            self._iterators.pop(worker, None)
        self._forget(worker)


class Parts(Feed):
    """Parts of batches that the chief reads.

    Args:
      read: gives the parts of the next batch, each a flat list of tensors.
    """

    from_chief = True

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        # Reading may take long, and nobody else waits for it.
        self._reading = threading.Lock()
        self._parts: collections.deque[Any] = collections.deque()
        self._taken: dict[int, Any] = {}
        self._at_end = False

    def take(self, worker: int) -> Any | None:
        """The next part; None at the end."""
        while True:
            with self._lock:
                if self._parts:
                    part = self._taken[worker] = self._parts.popleft()
                    return part
                if self._at_end:
                    return None
            with self._reading:
                if self.has_more(worker):
                    self._read_more()

    def _read_more(self) -> None:
        with self._lock:
            if self._parts:
                return
        try:
            parts = self._read()
        except tf.errors.OutOfRangeError:
            with self._lock:
                self._at_end = True
            return
        with self._lock:
            self._parts.extend(parts)

    def has_more(self, worker: int) -> bool:
        """True if `take` has something for `worker`, as far as is known."""
        del worker
        with self._lock:
            return bool(self._parts) or not self._at_end

    def used(self, worker: int) -> None:
        """Says that a contribution was made of what `worker` took."""
        with self._lock:
            self._taken.pop(worker, None)

    def release(self, worker: int) -> None:
        """Says that `worker` was lost: another one computes from what it had taken."""
        with self._lock:
            if (part := self._taken.pop(worker, None)) is not None:
                self._parts.appendleft(part)
