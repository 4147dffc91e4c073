# SPDX-License-Identifier: Apache-2.0
"""A `ClusterCoordinator` made of threads, for driving the real engine without a cluster, in milliseconds.

It keeps the promises that `tfdist.compat.tensorflow.coordinator` writes down, and no others: a free worker takes the
closure that was queued first, nobody chooses which worker that is, and a closure that meets a lost task runs again
elsewhere.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow import coordinator
from tfdist.coordination import keepalive
from tfdist.engines import asynchronous as coordinated
from tfdist.passes import worker_batch

_here = threading.local()


class FakeCluster:
    """Workers as threads.

    Attributes:
      failure: what the coordinator could not mend, if anything.
      found_dead: workers that the coordinator knows to be gone without a closure having met it.
      lives: how often each worker has come back.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.failure: BaseException | None = None
        self.found_dead: set[int] = set()
        self.lives: collections.Counter[int] = collections.Counter()
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[Callable[..., None], tuple]] = collections.deque()
        self._gone: set[int] = set()
        self._done: Callable[[int], None] = lambda worker: None
        self._stopped = False
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(num_workers)]

    # What `closures` offers.

    def scheduling(self, coordinator: Any) -> Callable[..., None]:
        def schedule(function: Callable[..., None], args: tuple, kwargs: dict[str, Any]) -> None:
            assert not kwargs
            if self.failure is not None:
                self.raise_failure(coordinator)
            with self._changed:
                self._queue.append((function, args))
                self._changed.notify_all()

        return schedule

    def after_each(self, coordinator: Any, lost: Container[int], method: Callable[[int], None]) -> None:
        self._done = lambda worker: method(worker) if worker in lost else None

    def create_on_workers(self, coordinator: Any, function: Callable[..., Any], *args: Any) -> PerWorker:
        values = []
        for worker in range(self.num_workers):
            with as_worker(worker):
                values.append(function(*_localize(args, worker)))
        return PerWorker(values)

    def current_worker(self) -> int | None:
        return getattr(_here, "worker", None)

    this_worker = current_worker

    def lost_workers(self, coordinator: Any) -> set[int]:
        return set(self.found_dead)

    def has_failed(self, coordinator: Any) -> bool:
        return self.failure is not None

    def raise_failure(self, coordinator: Any) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    # What happens to a cluster.

    def lose(self, worker: int) -> None:
        """The task of this worker is gone: whatever it takes next fails."""
        with self._changed:
            self._gone.add(worker)

    def find_dead(self, worker: int) -> None:
        """Loses a worker in such a way that the coordinator knows before the worker takes another closure."""
        with self._changed:
            self.found_dead.add(worker)

    def bring_back(self, worker: int) -> None:
        with self._changed:
            self._gone.discard(worker)
            self.found_dead.discard(worker)
            self.lives[worker] += 1
            self._changed.notify_all()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=20)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        assert not stuck, f"threads of workers that never came back: {stuck}"

    def _work(self, worker: int) -> None:
        with as_worker(worker):
            while (taken := self._take(worker)) is not None:
                function, args = taken
                try:
                    function(*_localize(args, worker))
                except tf.errors.UnavailableError:
                    with self._changed:
                        self._queue.append(taken)
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: worker not in self._gone or self._stopped)
                self._done(worker)

    def check_alive(self) -> None:
        """Raises what a call to a lost task raises, in the thread of its worker."""
        if self.current_worker() in self._gone:
            raise tf.errors.UnavailableError(None, None, "worker is gone")

    def _take(self, worker: int) -> tuple[Callable[..., None], tuple] | None:
        with self._changed:
            self._changed.wait_for(lambda: (self._queue and worker not in self.found_dead) or self._stopped)
            return self._queue.popleft() if self._queue and not self._stopped else None


class PerWorker:
    """One value for each worker; a closure gets the one of the worker that it runs on."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


class FakeProgram:
    """A step in plain Python: `function(*batch, *tensors)` gives the result, a number."""

    accumulation = None
    num_several = 1
    knows_silence = False
    is_plain = True

    def __init__(self, cluster: FakeCluster, function: Callable[..., Any]) -> None:
        self._cluster = cluster
        self._function = function
        self.fetched = 0

    def run(self, *inputs: Any) -> Any:
        self._cluster.check_alive()
        return self._function(*(i.get_next() if isinstance(i, FakeIterator) else i for i in inputs))

    def run_silently(self, *inputs: Any) -> None:
        self.run(*inputs)

    def prepare_silent(self) -> None:
        """A step in Python is the same with and without its result."""

    def prepare_several(self) -> None:
        """Several steps in Python are made one by one."""

    def batch_in(self, outputs: Any) -> tuple[()]:
        return ()

    def staleness_in(self, outputs: Any) -> list[None]:
        return [None]

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        self.fetched += 1
        return [np.asarray(outputs)]


class FakeDataset:
    """Stands for a data set of `WorkerIterator`: the numbers of batches, and something to iterate over.

    Args:
      cluster: whose workers read it.
      shares: batches of each worker; the batches themselves are `Batch(worker, position)`.
      known: "total and shares", or "nothing".
      can_move: False for data of each worker's own.
    """

    element_spec = tf.TensorSpec([None], tf.int64)
    lives_in_python = marks_end = False

    def __init__(
        self, cluster: FakeCluster, shares: Sequence[int], known: str = "total and shares", can_move: bool = True
    ) -> None:
        self._cluster = cluster
        self.can_move = can_move
        self._shares = list(shares)
        self._known = known
        self.kind = worker_batch.kind_of(cluster, self.element_spec)
        self.next_one = worker_batch.WorkerBatch(self.kind)

    @property
    def cardinality(self) -> int:
        return tf.data.UNKNOWN_CARDINALITY if self._known == "nothing" else sum(self._shares)

    def share(self, worker: int) -> int | None:
        return self._shares[worker] if self._known == "total and shares" else None

    def share_sizes(self) -> list[int | None]:
        return [self.share(worker) for worker in range(len(self._shares))]

    def begin_pass(self) -> int:
        return 1

    def iterate_on_workers(self, opened: Any, position: Callable[[int], int]) -> PerWorker:
        return PerWorker(
            [FakeIterator(self._cluster, worker, size, position) for worker, size in enumerate(self._shares)]
        )

    def iterate_piece(self, opened: Any, share: int, start: int, step: int) -> FakeIterator:
        self._cluster.check_alive()
        return FakeIterator(self._cluster, share, self._shares[share], lambda share: start, step)


@dataclasses.dataclass(frozen=True, order=True)
class Batch:
    """Batch that a worker reads: the worker whose share has it, and its place there."""

    worker: int
    position: int


class FakeIterator:
    """An iterator on a worker; a worker that was lost and is back has one that goes on after what it had taken."""

    def __init__(
        self, cluster: FakeCluster, worker: int, size: int, taken: Callable[[int], int], step: int = 1
    ) -> None:
        self._cluster = cluster
        self._step = step
        self._worker = worker
        self._size = size
        self._taken = taken
        self._life = -1

    def get_next(self) -> Batch:
        self._cluster.check_alive()
        if self._life != self._cluster.lives[self._worker]:
            self._life = self._cluster.lives[self._worker]
            self._batches = iter(
                [Batch(self._worker, at) for at in range(self._taken(self._worker), self._size, self._step)]
            )
        batch = next(self._batches, None)
        if batch is None:
            raise tf.errors.OutOfRangeError(None, None, "read beyond the end of a share")
        return batch

    def get_next_as_optional(self) -> FakeOptional:
        try:
            return FakeOptional(self.get_next())
        except tf.errors.OutOfRangeError:
            return FakeOptional(None)


class FakeOptional:
    def __init__(self, value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        return self._value is not None

    def get_value(self) -> list[Any]:
        return [self._value]


@contextlib.contextmanager
def running_engine(
    num_workers: int, clock: Callable[[], float] = lambda: 0.0, poll_secs: float = 60.0, **options: Any
) -> Iterator[tuple[coordinated.AsynchronousEngine, FakeCluster]]:
    """The real engine over threads.

    Nothing may depend on polling, other than noticing that somebody was lost: it is so slow here that a wake-up that
    is missing is a test that hangs.
    """
    cluster = FakeCluster(num_workers)
    names = ("scheduling", "after_each", "create_on_workers", "current_worker")
    names += ("this_worker", "lost_workers", "has_failed", "raise_failure")
    with contextlib.ExitStack() as stack:
        fakes = {name: getattr(cluster, name) for name in names} | {"clear_error": lambda: None, "thread": _here}
        for name, fake in fakes.items():
            for module in with_name(coordinator, name):
                stack.enter_context(mock.patch.object(module, name, fake))
        stack.enter_context(mock.patch.object(tf.distribute.coordinator, "ClusterCoordinator", lambda strategy: None))
        stack.enter_context(mock.patch.object(keepalive, "POLL_SECS", poll_secs))
        engine = coordinated.AsynchronousEngine(None, num_workers, clock, **options)
        cluster.start()
        try:
            yield engine, cluster
        finally:
            engine.close()  # lets parked threads go, also where the test has failed
            cluster.stop()


def with_name(home: types.ModuleType, name: str) -> list[types.ModuleType]:
    """Modules of tfdist in which a name stands for what it is in `home`."""
    found = [module for key, module in sys.modules.items() if key.split(".")[0] == "tfdist"]
    return [module for module in found if vars(module).get(name) is getattr(home, name)]


@contextlib.contextmanager
def as_worker(worker: int) -> Iterator[None]:
    _here.worker, before = worker, getattr(_here, "worker", None)
    try:
        yield
    finally:
        _here.worker = before


def _localize(args: Sequence[Any], worker: int) -> list[Any]:
    return [arg.values[worker] if isinstance(arg, PerWorker) else arg for arg in args]
