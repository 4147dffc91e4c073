# SPDX-License-Identifier: Apache-2.0
"""Passes over data that the workers read, and their handles in the chief's loop.

Ownership: the chief owns a `WorkerDataset` (a description, shipped to each worker once) and, per pass over it, a
`WorkerIterator`. The batches themselves are on the workers; `next(iterator)` returns a `WorkerBatch`, a handle of "the
next batch of this iterator, on the worker that runs the step" (`worker_batch`).

There are two ways to feed a step:

* `worker`: each worker has an iterator over its own share, and takes its next batch from it. For training.
* `chief`: the chief reads the data once, in order, and sends each batch along with the step. For `evaluate` and
  `predict`, which must see every example exactly once and in order, and for data that only exists in the chief's
  Python (generators).
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, cast

import tensorflow as tf

from tfdist.compat import calls
from tfdist.compat.autograph_loops import LoopIterator
from tfdist.compat.cluster_joining import CHIEF_DEVICE
from tfdist.data import splitting
from tfdist.data.handle import HandleIterator, registry
from tfdist.engines.parameter_server import worker_batch, worker_dataset
from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_dataset import WorkerDataset

# The states of this many batches are kept for handles made within a graph, which hold no reference.
_KEPT_FOR_GRAPHS = 8


class Steps(Protocol):
    """The part of an engine that a pass needs."""

    def make_room(self) -> None:
        """Waits until another step may be queued."""
        ...

    def barrier(self, writes: bool) -> None:
        """Waits for all steps queued so far."""
        ...

    def read_batch(self, iterator: WorkerIterator, handle: WorkerBatch) -> Sequence[Any]:
        """Fetches the next batch of a worker's share, flat."""
        ...


class Batch:
    """State of one batch, for the lifetime of its handles.

    Args:
      iterator: the pass.
      number: number of the batch, from 1 on; 0 for the next batch.
      count: how many batches it stands for, those that follow included.
    """

    def __init__(self, iterator: WorkerIterator, number: int = 0, count: int = 1):
        self.iterator = iterator
        self.number = number
        self.count = count
        # True if a step has read the batch, or was given the chief's value.
        self.is_used = False
        # Flat, on the worker that has read it.
        self.on_worker: Sequence[tf.Tensor] | None = None
        # Flat, on the chief.
        self.on_chief: Sequence[Any] | None = None

    @property
    def handle(self) -> int:
        """Returns the int64 of a handle of this batch."""
        return worker_batch.handle_of(self.iterator.id, self.number)

    def values(self) -> list[tf.Tensor]:
        """Returns the batch on the chief, flat; waits for a step in flight that has it."""
        if self.on_chief is None:
            self.on_chief = self._fetch() if self.is_used else self.iterator.read_for_chief()
            self.is_used = True
        return list(self.on_chief)

    def _fetch(self) -> list[tf.Tensor]:
        self.iterator.wait_for_steps()
        if self.on_worker is None:
            raise RuntimeError(
                "strategy.run was given a batch that one of Keras' own steps has used before; give it to one "
                "function that does both, or take another batch."
            )
        with tf.device(CHIEF_DEVICE):
            return [tf.identity(tensor) for tensor in self.on_worker]


class WorkerIterator(HandleIterator, LoopIterator):
    """The chief's iterator of one pass over a `WorkerDataset`. `next` returns handles, never data.

    Args:
      engine: the engine that makes the steps.
      dataset: the data.
      by_execution: True if one handle may stand for all batches of an execution of Keras (`steps_per_execution`).
    """

    def __init__(self, engine: Steps, dataset: WorkerDataset, by_execution: bool = False):
        super().__init__()
        self._by_execution = by_execution
        # How many batches the handle "the next batch" stands for.
        self._batches_in_handle = 1
        self._engine = engine
        self._dataset = dataset
        self._cardinality = dataset.cardinality
        self._handles_given = 0
        self._redeemed = 0
        self._feed: str | None = None
        self._local: Iterator[Any] | None = None
        self._cut_into = 1
        self._reading = threading.RLock()
        self._waiting: collections.deque[Any] = collections.deque()
        # Steps begun ahead of the handles for them (`predict`).
        self.started: collections.deque[Any] = collections.deque()
        self._on_workers: tf.distribute.coordinator.PerWorkerValue | None = None
        self._lock = threading.Lock()
        self._taken: collections.Counter[int] = collections.Counter()
        self._updates = 0
        self.exhausted: set[int] = set()
        # Workers that were lost while they had a share in this pass.
        self.lost: set[int] = set()
        self.ended = False
        self._number = 0
        self.id = registry.add(self)
        # The states of batches whose handles a user's loop has, by number.
        self._batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        self._kept_for_graphs: collections.deque[Batch] = collections.deque(maxlen=_KEPT_FOR_GRAPHS)
        # Keras uses each batch once, so a single handle is enough: "the next batch".
        self._next_one = worker_batch.handle(worker_batch.handle_of(self.id, 0), dataset.kind)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._dataset.batch_spec

    @property
    def counted(self) -> bool:
        """True if the number of batches is known or infinite, so that handles don't wait for the data."""
        return self._cardinality != tf.data.UNKNOWN_CARDINALITY

    @property
    def is_last(self) -> bool:
        """True if the last handle was the last one of the pass."""
        if self._handles_given == self._cardinality:
            return True
        # If the chief feeds, it can check for another batch.
        return self.ended or (not self.counted and self._local is not None and not self._has_next())

    def __next__(self) -> WorkerBatch:
        if not tf.executing_eagerly():
            return self._in_graph().get_next()
        return super().__next__()

    def next_handle(self) -> WorkerBatch | None:
        """See `HandleIterator`."""
        call = calls.current()
        if call is not None:
            if not self.counted and call.kind == "predict":
                # Keras takes the batches of `steps_per_execution` steps before it makes the first of them.
                self.feed(by_chief=True)
            # Of an execution there is one handle, however many of its batches are left.
            if self._batches_in_handle > 1 and self.given_in_execution:
                raise StopIteration
            self._batches_in_handle = self._give(self._wanted_batches())
            return self._next_one if self._batches_in_handle else None
        batch = self._give_batch()
        return None if batch is None else worker_batch.handle(batch.handle, self._dataset.kind, batch)

    def get_next_as_optional(self) -> worker_dataset.Optional:
        """Returns a handle of the next batch, or the end of the data."""
        if not tf.executing_eagerly():
            return self._in_graph().get_next_as_optional()
        try:
            return worker_dataset.Optional(tf.constant(True), next(self))
        except (StopIteration, tf.errors.OutOfRangeError):
            return worker_dataset.Optional(tf.constant(False), self._next_one)

    def next_for_graph(self) -> int:
        """Returns the int64 of a handle of the next batch, for a handle made within a graph."""
        batch = self._give_batch()
        if batch is None:
            raise StopIteration
        self._kept_for_graphs.append(batch)
        return batch.handle

    def __tf_tracing_type__(self, context: Any) -> worker_dataset.HandleType:
        """Passes the iterator to a `tf.function` by its number (`worker_dataset`)."""
        return worker_dataset.HandleType(worker_dataset.GraphIterator, self._dataset.kind.number)

    def _in_graph(self) -> worker_dataset.GraphIterator:
        return worker_dataset.GraphIterator(tf.constant(self.id, tf.int64), self._dataset.kind.number)

    def _give_batch(self) -> Batch | None:
        if not self.counted:
            # A user's loop ends at the end of the data, which only a reader detects.
            self.feed(by_chief=True)
        if not self._give():
            return None
        batch = self._batches[self._handles_given] = Batch(self, self._handles_given)
        return batch

    def _wanted_batches(self) -> int:
        """Returns how many batches the next handle may stand for: several only if workers read them in the step."""
        if not self._by_execution:
            return 1
        call = calls.current()
        wanted = 1 if call is None else call.steps_per_execution
        return wanted if wanted > 1 and self.feed(by_chief=False) == "worker" and self.shares_known else 1

    def _give(self, wanted: int = 1) -> int:
        """Counts the batches of one more handle, at most `wanted`; returns 0 at the end of the data."""
        self._engine.make_room()
        if not self._handles_given:
            self._begin_fit()
        if self._handles_given == self._cardinality or not self._has_next():
            return 0
        count = wanted if self._cardinality < 0 else min(wanted, self._cardinality - self._handles_given)
        self._handles_given += count
        return count

    def next_batch(self) -> Batch:
        """Returns the state of what the handle "the next batch" stands for."""
        return Batch(self, count=self._batches_in_handle)

    def batch(self, number: int) -> Batch:
        """Returns the state of a batch by its number; of the next batch for 0."""
        if not number:
            return self.next_batch()
        batch = self._batches.get(number)
        if batch is None:
            raise RuntimeError(
                f"a tf.function has kept batch {number} of a pass for longer than {_KEPT_FOR_GRAPHS} batches; use each "
                "batch in the iteration that takes it"
            )
        return batch

    def _begin_fit(self) -> None:
        """Reads the first batch before the first step of `fit`, if it must be cut and the chief reads it."""
        if calls.iterating_fit() is not None and self._dataset.num_parts > 1 and self._dataset.lives_in_python:
            self._cut_into = self._dataset.num_parts
            self.feed(by_chief=True)

    def read_for_chief(self) -> list[Any]:
        """Returns the next batch, flat, for use on the chief."""
        if self.feed(by_chief=True) == "worker":
            return list(self._engine.read_batch(self, self._next_one))
        self.redeem()
        return self.next_local_batch()

    def wait_for_steps(self) -> None:
        """Waits for all steps in flight."""
        self._engine.barrier(writes=False)

    @property
    def shares_known(self) -> bool:
        """True if each worker's number of batches is known before they are read."""
        return self.counted and self._dataset.share(0) is not None

    def has_batch(self, worker: int) -> bool:
        """Returns True if `worker` may have a batch left. Only that worker's thread calls this."""
        return worker not in self.exhausted and self.available(worker, 1) > 0

    def available(self, worker: int, wanted: int) -> int:
        """Returns how many of so many batches `worker` has left. Only that worker's thread calls this."""
        share = self._dataset.share(worker)
        return wanted if share is None else min(wanted, share - self._taken[worker])

    def took_batch(self, worker: int, count: int = 1) -> None:
        """Counts batches that `worker` is done with."""
        self._taken[worker] += count

    def begin_update(self) -> None:
        """Counts an update that all workers contribute to, each with its part of one batch."""
        self._updates += 1

    def _position(self, worker: int) -> int:
        """Returns the number of batches that a restarted worker skips."""
        return self._updates - 1 if self._updates else self._taken[worker]

    def loss(self, gone: set[int]) -> str | None:
        """Describes the unused batches of lost workers, after the pass; None if there are none.

        Args:
          gone: The workers that are still lost.
        """
        # A restarted worker reads the rest of its share. If batches belong to no worker, those that it had fetched are
        # lost.
        is_dealt_out = self._dataset.is_dealt_out
        workers = self.lost if is_dealt_out else gone - self.exhausted
        return describe_lost_batches(self._number, self._cardinality, self._taken.total(), workers, is_dealt_out)

    def feed(self, by_chief: bool) -> str:
        """Decides, at the first step, if the chief or the workers feed this pass."""
        with self._lock:
            if self._feed is None:
                self._feed = "chief" if by_chief or self._dataset.lives_in_python else "worker"
                if self._feed == "chief":
                    self._local = self._dataset.local_iterator()
            return self._feed

    def on_workers(self) -> tf.distribute.coordinator.PerWorkerValue:
        """Returns the iterators on the workers, made at the first step."""
        with self._lock:
            if self._on_workers is None:
                self._on_workers = self._dataset.iterate_on_workers(self._position)
                self._number = self._dataset.passes
            return self._on_workers

    def redeem(self) -> None:
        """Counts a handle whose batch the chief has fed."""
        self._redeemed += 1

    def next_local_batch(self) -> list[tf.Tensor]:
        """Returns the chief's next batch, flat. Raises `tf.errors.OutOfRangeError` at the end."""
        return self._waiting.popleft() if self._waiting else self._read()

    def read_ahead(self) -> list[tf.Tensor]:
        """Returns the chief's next batch, flat, possibly before its handle exists; any thread may call it."""
        with self._reading:
            batch = self.next_local_batch()
            self.started.append(None)
            return batch

    def redeem_ahead(self) -> None:
        """Counts a handle whose batch `read_ahead` has read."""
        with self._reading:
            if self.started:
                self.started.popleft()
            self.redeem()

    @property
    def is_cut(self) -> bool:
        """True if workers read parts of batches."""
        return self._dataset.is_cut

    @property
    def is_shared_out(self) -> bool:
        """True if the data were cut into shares beforehand."""
        return self._dataset.is_shared_out

    def open_shares(self) -> Callable[[int, int], Any]:
        """Begins a pass over the shares; returns a function (share, number of parts to skip) -> iterator.

        The function makes the iterator on the worker of the calling thread.
        """
        return self._dataset.open_shares()

    def forget_shares(self, worker: int) -> None:
        """Notes that `worker` was lost, with its iterators."""
        self._dataset.forget_shares(worker)

    def _has_next(self) -> bool:
        """Returns True if there is a batch for another handle. If the chief feeds, it reads this batch ahead.

        So the end is known before a step begins: a step that fails at the end would discard the results of the other
        steps of its execution (`steps_per_execution`).
        """
        with self._reading:
            return self._looks_ahead()

    def _looks_ahead(self) -> bool:
        if self._local is None:
            return not self.ended
        while len(self._waiting) + len(self.started) <= self._handles_given - self._redeemed:
            try:
                self._waiting.append(self._read())
            except tf.errors.OutOfRangeError:
                return False
        return True

    def _read(self) -> list[tf.Tensor]:
        if self._local is None:
            raise RuntimeError("next_local_batch() on data that the workers read.")
        try:
            batch = next(self._local)
        except StopIteration:
            self.ended = True
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None
        if self._cut_into > 1:
            splitting.check_examples(batch, self._cut_into)
        return tf.nest.flatten(batch, expand_composites=True)


def find_iterator(handle: int) -> WorkerIterator:
    """Returns the pass that a handle belongs to."""
    # Nothing else is registered.
    return cast(WorkerIterator, worker_batch.find_pass(handle))


def find_batch(handle: int) -> Batch:
    """Returns the state of the batch that a handle stands for."""
    return find_iterator(handle).batch(worker_batch.number_in(handle))


# The warning about batches that no step was made of, because a worker was lost.


def describe_lost_batches(number: int, total: int, used: int, lost: Collection[int], is_dealt_out: bool) -> str | None:
    """Returns the text of the warning; None if no batch is missing.

    Args:
      number: of the pass.
      total: batches of the pass, or one of tf.data's constants for an unknown or endless number.
      used: how many of them were used.
      lost: the workers whose batches are missing.
      is_dealt_out: True if a batch goes to the worker that asks first.
    """
    is_counted = total != tf.data.UNKNOWN_CARDINALITY
    if not lost or total == tf.data.INFINITE_CARDINALITY or (is_counted and used >= total):
        return None
    what = f"{total - used} of its {total} batches" if is_counted else "an unknown number of batches"
    why = (
        "it had fetched them"
        if is_dealt_out
        else "they were the rest of its share, and the others had come to the end of theirs before it was back; "
        "with data_sharding='dynamic', or policies=[tfdist.SoftSync(1)], the others make them"
    )
    names = " and ".join(f"worker:{worker}" for worker in sorted(lost))
    return f"Pass {number} over the data ended without {what}. {names} was lost; {why}."
