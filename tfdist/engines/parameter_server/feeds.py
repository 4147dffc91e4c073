# SPDX-License-Identifier: Apache-2.0
"""Sources of batches, or of parts of batches, for workers that are not synchronized with Keras' steps.

    Shares    one shard of the data per worker: a worker reads its own shard, and then a shard without a reader (its
              worker was lost, or doesn't take part yet), from the position of its last reader
    Streams   each worker reads its own iterator to the end
    Parts     the chief reads the data, and a worker takes the next part

The workers' threads on the chief call them. A part that was taken and not used, because its worker was lost, is
assigned again; so each part is used once.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Feed:
    """Interface of all three; each call concerns one worker.

    Attributes:
      from_chief: True if `take` returns a batch, and not an iterator on the worker.
    """

    from_chief = False

    def arrive(self, worker: int, iterator: Any) -> None:
        """Notes that `worker` takes part, with its own iterator if each worker has one."""

    def take(self, worker: int) -> Any | None:
        """Returns the source of the next contribution of `worker`; None at the end."""
        raise NotImplementedError

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""

    def ended(self, worker: int) -> None:
        """Notes that the iterator of `worker` has ended."""

    def has_more(self, worker: int) -> bool:
        """Returns True if `take` has a source for `worker`, or may have one."""
        raise NotImplementedError

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost."""


class Streams(Feed):
    """An iterator on each worker.

    Args:
      used: called for each contribution, so that a restarted worker skips the batches that it has used.
    """

    def __init__(self, used: Callable[[int], None] = lambda worker: None) -> None:
        self._used = used
        self._lock = threading.Lock()
        self._iterators: dict[int, Any] = {}
        self._at_end: set[int] = set()

    def arrive(self, worker: int, iterator: Any) -> None:
        """Notes that `worker` takes part, with its own iterator."""
        with self._lock:
            self._iterators[worker] = iterator

    def take(self, worker: int) -> Any | None:
        """Returns the iterator of `worker`; None at the end."""
        with self._lock:
            return None if worker in self._at_end else self._iterators[worker]

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""
        self._used(worker)

    def ended(self, worker: int) -> None:
        """Notes that the iterator of `worker` has ended."""
        with self._lock:
            self._at_end.add(worker)

    def has_more(self, worker: int) -> bool:
        """Returns True if `take` has a source for `worker`."""
        with self._lock:
            return worker not in self._at_end


class Shares(Feed):
    """Shares of the data, each read by one worker at a time.

    Args:
      count: number of shares, one for each worker.
      open_share: makes an iterator over share `share` without its first `position` parts, on the worker of this thread.
      forget: called with a worker that was lost, whose iterators are gone.
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
        """Returns the iterator over the share of `worker`, or over a share without a reader; None at the end."""
        with self._lock:
            if worker not in self._held:
                if not self._free:
                    return None
                share = worker if worker in self._free else min(self._free)
                self._free.discard(share)
                self._held[worker] = share
            share = self._held[worker]
        if worker not in self._iterators:
            # Only this worker's thread opens it.
            self._iterators[worker] = self._open_share(share, self._positions[share])
        return self._iterators[worker]

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""
        with self._lock:
            if worker in self._held:
                self._positions[self._held[worker]] += 1

    def ended(self, worker: int) -> None:
        """Notes that the share of `worker` has ended."""
        with self._lock:
            self._held.pop(worker, None)
            self._iterators.pop(worker, None)

    def has_more(self, worker: int) -> bool:
        """Returns True if `take` has a source for `worker`."""
        with self._lock:
            return worker in self._held or bool(self._free)

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost: another worker may continue its share."""
        with self._lock:
            if (share := self._held.pop(worker, None)) is not None:
                self._free.add(share)
            self._iterators.pop(worker, None)
        self._forget(worker)


class Parts(Feed):
    """Parts of batches that the chief reads.

    Args:
      read: returns the parts of the next batch, each a flat list of tensors.
    """

    from_chief = True

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        # A lock of its own, because reading may take long.
        self._reading = threading.Lock()
        self._parts: collections.deque[Any] = collections.deque()
        self._taken: dict[int, Any] = {}
        self._at_end = False

    def take(self, worker: int) -> Any | None:
        """Returns the next part; None at the end."""
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
        """Returns True if `take` has a source for `worker`, or may have one."""
        del worker
        with self._lock:
            return bool(self._parts) or not self._at_end

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""
        with self._lock:
            self._taken.pop(worker, None)

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost: another worker takes its part."""
        with self._lock:
            if (part := self._taken.pop(worker, None)) is not None:
                self._parts.appendleft(part)
