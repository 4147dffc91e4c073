# SPDX-License-Identifier: Apache-2.0
"""Sums and messages of arrays over the workers by MPI, through mpi4py (`mpi_library` starts it).

How an array is summed. Up to `_SMALL_BYTES` the library's own all-reduce is used. A larger one is cut into a block for
each worker, and goes twice around a ring of workers (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009): in the first round each block is added up, in the second one all get it. Blocks
are sent in segments, so that one is added while the next one is under way, and still in the cache when it goes on. All
workers have the same sums, bit by bit, because each block is added up in one place.

Nothing here waits within the library. A wait asks for progress again and again, at first at once and then with pauses,
so that a worker that waits leaves its core to those that compute; and it looks whether the others live.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_SMALL_BYTES = 2**16
_SEGMENT_BYTES = 2**19
_TAG = 1
# Marks are below it: small enough for a sum of many of them to be exact in any dtype.
_MARKS = 1021
# For so long a wait spins, and then yields, before it begins to sleep; with more workers than cores it sleeps at once.
_SPIN_SECS, _YIELD_SECS = 50e-6, 500e-6
_SLEEP_SECS = 50e-6
_CHECK_SECS = 1.0
# For so long after an error of the library it is asked which worker was lost.
_BLAME_SECS = 12.0


class Mpi:
    """The workers' sums.

    Args:
      module: `mpi4py.MPI`, initialized.
      communicator: of all workers, in their order.
      check: called about once a second while a sum is waited for; raises ConnectionError if it will never come.
      is_polite: whether waits sleep at once, because the workers of this machine share its cores.

    Attributes:
      failure: what the first sum that failed has raised; all later ones raise it again.
    """

    def __init__(self, module: Any, communicator: Any, check: Callable[[], None], is_polite: bool = False) -> None:
        self._module = module
        self._comm = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._before, self._after = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._check = check
        self._spin_secs, self._yield_secs = (0.0, 0.0) if is_polite else (_SPIN_SECS, _YIELD_SECS)
        self._lock = threading.Lock()
        self._segments: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._count = 0
        self._mark = np.zeros(1, np.int64)
        self.failure: Exception | None = None
        # What a failed sum has left in the library, which may still write there.
        self._abandoned: list[Any] = []

    def sum(self, array: np.ndarray, in_place: bool = False) -> np.ndarray:
        """Returns the sum of the workers' 1-D arrays, which have one size and dtype; in place, or in a new array.

        Small arrays are never summed in place.

        Raises:
          ConnectionError: a worker has ended or failed, or the library reports an error.
          RuntimeError: the workers have come to different sums.
        """
        if self._size == 1:
            return array if in_place else array.copy()
        with self._lock:
            return self._noting_failure(lambda: self._sum(array, in_place), array)

    def _noting_failure(self, call: Callable[[], Any], array: np.ndarray) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            return call()
        except Exception as error:
            self.failure = error
            self._abandoned.append(array)
            raise

    def gather(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gathers a message of each worker.

        Args:
          message: 1-D uint8; each worker has one of its own length.

        Returns:
          The messages, uint8 [workers, longest], padded with zeros, and their lengths, int64.

        Raises:
          ConnectionError, RuntimeError: see `sum`.
        """
        with self._lock:
            return self._noting_failure(lambda: self._gather(np.ascontiguousarray(message)), message)

    def _gather(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._count += 1
        self._meet((7919 * self._count + 1) % _MARKS, f"messages {self._count} of all workers")
        lengths = np.zeros(self._size, np.int64)
        lengths[self._rank] = len(message)
        self._wait([self._comm.Iallgather(self._module.IN_PLACE, lengths)], lengths)
        gathered = np.zeros([self._size, int(lengths.max())], np.uint8)
        starts = np.arange(self._size) * gathered.shape[1]
        place = [gathered, lengths, starts, self._module.BYTE]
        self._wait([self._comm.Iallgatherv([message, self._module.BYTE], place)], message, gathered, lengths, starts)
        return gathered, lengths

    def _sum(self, array: np.ndarray, in_place: bool) -> np.ndarray:
        self._count += 1
        mark = (7919 * self._count + 31 * array.nbytes + array.dtype.num) % _MARKS
        here = f"sum {self._count} over all workers, of {len(array)} values of {array.dtype}"
        if array.nbytes <= _SMALL_BYTES:
            marked = np.empty(len(array) + 1, array.dtype)
            marked[:-1], marked[-1] = array, mark
            self._wait([self._comm.Iallreduce(self._module.IN_PLACE, marked)], marked)
            self._check_mark(marked[-1], mark, here)
            return marked[:-1]
        self._meet(mark, here)
        total = array if in_place else np.empty_like(array)
        self._sum_in_ring(array, total)
        return total

    def _meet(self, mark: int, here: str) -> None:
        self._mark[0] = mark
        self._wait([self._comm.Iallreduce(self._module.IN_PLACE, self._mark)])
        self._check_mark(self._mark[0], mark, here)

    def _check_mark(self, found: Any, mark: int, here: str) -> None:
        """Raises RuntimeError unless all workers have the same call before them, by its number, and size and dtype."""
        if int(found) != self._size * mark:
            raise RuntimeError(
                "the workers have come to different sums: one of them has made a call that the others have not, such "
                f"as evaluate on the chief only. All workers must run the same program. Here: {here}"
            )

    def _sum_in_ring(self, array: np.ndarray, total: np.ndarray) -> None:
        rank, size = self._rank, self._size
        bounds = [len(array) * block // size for block in range(size + 1)]
        spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        for step in range(size - 1):
            sent, added = spans[(rank - step) % size], spans[(rank - step - 1) % size]
            # What was added up in the step before goes on; in the first one, what this worker has.
            self._add_block((total if step else array)[sent], array[added], total[added])
        for step in range(size - 1):
            self._pass_on(total[spans[(rank + 1 - step) % size]], total[spans[(rank - step) % size]])

    def _add_block(self, sent: np.ndarray, own: np.ndarray, total: np.ndarray) -> None:
        """Sends a block to the next worker; the sum of the one of the worker before and `own` goes to `total`."""
        length = _SEGMENT_BYTES // sent.itemsize
        out = [sent[start : start + length] for start in range(0, len(sent), length)]
        into = [slice(start, min(start + length, len(own))) for start in range(0, len(own), length)]
        # A segment is received while the one before is added.
        places = self._places_for(sent.dtype, length)
        waiting = self._exchange(out[:1], into[:1], places[0])
        for number in range(max(len(out), len(into))):
            after = slice(number + 1, number + 2)
            following = self._exchange(out[after], into[after], places[(number + 1) % 2])
            self._wait(waiting)
            for span in into[number : number + 1]:
                np.add(own[span], places[number % 2][: span.stop - span.start], out=total[span])
            waiting = following

    def _exchange(self, out: Sequence[np.ndarray], into: Sequence[slice], place: np.ndarray) -> list[Any]:
        received = [self._comm.Irecv(place[: span.stop - span.start], self._before, _TAG) for span in into]
        return [*received, *(self._comm.Isend(segment, self._after, _TAG) for segment in out)]

    def _pass_on(self, sent: np.ndarray, received: np.ndarray) -> None:
        self._wait([self._comm.Irecv(received, self._before, _TAG), self._comm.Isend(sent, self._after, _TAG)])

    def _places_for(self, dtype: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        if dtype not in self._segments:
            self._segments[dtype] = np.empty(length, dtype), np.empty(length, dtype)
        return self._segments[dtype]

    def _wait(self, requests: list[Any], *kept: Any) -> None:
        """Waits until these requests are done; after a failure, they and what they write to are kept."""
        try:
            self._wait_for(requests)
        except BaseException:
            self._abandoned += [*requests, *kept, *self._segments.values()]
            raise

    def _wait_for(self, requests: list[Any]) -> None:
        if self._are_done(requests):
            return
        began = checked = time.perf_counter()
        while not self._are_done(requests):
            now = time.perf_counter()
            waited = now - began
            if waited >= self._yield_secs:
                time.sleep(_SLEEP_SECS)
            elif waited >= self._spin_secs:
                os.sched_yield()
            if now - checked > _CHECK_SECS:
                checked = now
                self._check()

    def _are_done(self, requests: list[Any]) -> bool:
        try:
            return self._module.Request.Testall(requests)
        except self._module.Exception as error:
            self._blame(error)
            raise ConnectionError(f"a sum over all workers has failed in the MPI library: {error}") from error

    def _blame(self, error: Exception) -> None:
        """Raises ConnectionError with the name of a worker that is found to be lost, soon after an error."""
        deadline = time.monotonic() + _BLAME_SECS
        while time.monotonic() < deadline:
            try:
                self._check()
            except ConnectionError as loss:
                raise loss from error
            time.sleep(min(_CHECK_SECS, _BLAME_SECS / 10))
