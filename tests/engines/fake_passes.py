# SPDX-License-Identifier: Apache-2.0
"""Passes over fake data sets, driven as Keras drives them, and a gate that holds their steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from fake_cluster import Batch, FakeCluster, FakeDataset, FakeProgram

from tfdist.engines.asynchronous import AsynchronousEngine
from tfdist.passes.worker_pass import WorkerIterator


class Pass:
    """One pass over data, driven as Keras drives it; remembers which batches were made by whom.

    Args:
      engine: the engine.
      cluster: its workers.
      shares: batches of each worker.
      known: see `FakeDataset`.
      work: called with the batch at each step, before it counts; may raise.
      can_move: see `FakeDataset`.
    """

    def __init__(
        self,
        engine: AsynchronousEngine,
        cluster: FakeCluster,
        shares: list[int],
        known: str = "total and shares",
        work: Callable[[Any], Any] = lambda batch: None,
        can_move: bool = True,
    ) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._work = work
        self.batches: list[Any] = []
        self.program = FakeProgram(cluster, self._step)
        self.iterator = WorkerIterator(engine, FakeDataset(cluster, shares, known, can_move))

    def _step(self, batch: Any, *tensors: Any) -> int:
        self._work(batch)
        with self._lock:
            self.batches.append(batch)
            return len(self.batches)

    def step(self) -> int:
        """One turn of Keras' loop; the logs of it, which are the number of batches."""
        if self.iterator.take_handle(1) is None:
            raise StopIteration
        return int(self._engine.step(self.program, [], self.iterator.feed, last=self.iterator.is_last)[0])

    def run(self) -> list[int]:
        """All turns of Keras' loop; the logs of each."""
        logs = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while True:
                logs.append(self.step())
        return logs


def all_of(shares: list[int]) -> list[Batch]:
    return [Batch(worker, position) for worker, size in enumerate(shares) for position in range(size)]


class Gate:
    """Holds steps until it is opened, and says how many arrived."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._arrived = threading.Semaphore(0)

    def __call__(self, batch: Any = None) -> None:
        self._arrived.release()
        assert self._open.wait(30)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._arrived.acquire(timeout=30)

    def open(self) -> None:
        self._open.set()
