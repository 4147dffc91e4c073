# SPDX-License-Identifier: Apache-2.0
"""Passes over data that the workers read, and their handles in the chief's loop.

Who owns what:

    WorkerDataset     a description of the data, shipped to each worker once
    WorkerIterator    the place of the chief's loop in one pass over them; it gives handles, never data
    feed of the pass  who reads the batches, and how far the readers are; decided once, before the first batch is read
    Batch             what is known of one batch that a user's loop holds

`next(iterator)` returns a `WorkerBatch`, a handle of "the next batch of this iterator, on the worker that runs the
step" (`worker_batch`). There are two feeds:

* `WorkerFeed`: each worker has an iterator over its own share, and takes its next batch from it. For training.
* `ChiefFeed`: the chief reads the data once, in order, and sends each batch along with the step. For `evaluate` and
  `predict`, which must see every example exactly once and in order, and for data that only exists in the chief's
  Python (generators).

In Keras' loops the kind of the loop decides at the first handle. In others, and where steps run eagerly, the first use
of a batch decides: by a step on a worker, or by the chief for its value.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import calls, fit
from tfdist.compat.tensorflow.coordinator import CHIEF_DEVICE
from tfdist.passes import splitting
from tfdist.passes.handle import HandleIterator, check_eager
from tfdist.passes.worker_batch import WorkerBatch
from tfdist.passes.worker_dataset import Pass, WorkerDataset


@dataclasses.dataclass(eq=False)
class Piece:
    """Every `step`-th batch of a worker's share from `start` on. One worker at a time reads it.

    Attributes:
      share: index of the worker whose share it is.
      left: number of its batches that no step was made of; None if not known.
      start: position of its first batch in the share.
      step: distance of its batches in the share.
      used: number of its batches that steps were made of.
      is_left: True if it is the rest of a worker that was lost.
    """

    share: int
    left: int | None
    start: int = 0
    step: int = 1
    used: int = 0
    is_left: bool = False

    @property
    def position(self) -> int:
        """Position in the share of its next batch."""
        return self.start + self.used * self.step

    def divided(self, parts: int) -> list[Piece]:
        """Returns the rest, by turns, as at most so many pieces of at least one batch, or of unknown size."""
        sizes = [None if self.left is None else len(range(part, self.left, parts)) for part in range(parts)]
        return [
            Piece(self.share, size, self.position + part * self.step, self.step * parts)
            for part, size in enumerate(sizes)
            if size != 0
        ]


class Pieces:
    """The shares of a pass, and who reads them: each batch is used once, whichever worker is lost.

    A worker reads its own share first. A share that a lost worker has left is its own again when it is back. If another
    worker has come to the end of its share by then, the rest is divided among the workers that live.

        share 0   0 1 2 3 4 5            worker 0   0 1 2 3 4 5 | d
        share 1   a b c d e f            worker 1   a b c (lost)
        share 2   u v w x y z            worker 2   u v w x y z | e f    of d e f, each takes every second one

    Not safe to be used by several threads at once.

    Args:
      sizes: number of batches in the share of each worker, None if not known.
      can_move: False if no worker can read the share of another one.

    Attributes:
      own: the share of each worker, as a piece.
      held: by worker, the piece that it reads.
      num_used: number of batches that were used.
      readers: workers that have used a batch of their own share.
    """

    def __init__(self, sizes: Sequence[int | None], can_move: bool) -> None:
        self.own = [Piece(share, size) for share, size in enumerate(sizes)]
        self._can_move = can_move
        self.held = dict(enumerate(self.own))
        self._free: list[Piece] = []
        self._lost: set[int] = set()
        self.num_used = 0
        self.readers: set[int] = set()

    def wait_for_claims(self) -> None:
        """Lets any worker read a share that its worker has not claimed, because it takes no part yet."""
        self._free += self.held.values()
        self.held.clear()

    def claim(self, worker: int) -> Piece | None:
        """Returns the piece that `worker` reads; one that no worker reads if it has none, or None if there is none."""
        self._lost.discard(worker)
        if worker in self.held:
            return self.held[worker]
        if self.own[worker] in self._free:
            piece = self.held[worker] = self.own[worker]
            self._free.remove(piece)
            piece.is_left = False
            return piece
        while self._can_move and self._free:
            piece = self._free.pop(0)
            # Another iterator reads it from now on, so it is another piece.
            parts = piece.divided(len(self.own) - len(self._lost) if piece.is_left else 1)
            self._free += parts[1:]
            if parts:
                self.held[worker] = parts[0]
                return parts[0]
        return None

    def used(self, worker: int, count: int = 1) -> None:
        """Notes that steps of `worker` have used so many batches of its piece."""
        self.num_used += count
        if (piece := self.held.get(worker)) is not None:
            if piece is self.own[worker]:
                self.readers.add(worker)
            piece.used += count
            if piece.left is not None:
                piece.left -= count

    def end(self, worker: int) -> None:
        """Notes that the piece of `worker` has no batch left."""
        self.held.pop(worker, None)

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost."""
        self._lost.add(worker)
        piece = self.held.pop(worker, None)
        if piece is not None:
            piece.is_left = True
            self._free.append(piece)

    def has_more(self, worker: int) -> bool:
        """Returns True if `claim` has a piece for `worker`."""
        return worker in self.held or self.own[worker] in self._free or (self._can_move and bool(self._free))

    def unread(self, lost: Collection[int]) -> list[Piece]:
        """Returns the pieces that no worker can read as long as these are lost; if others live."""
        held = [piece for worker, piece in self.held.items() if worker in lost]
        return [] if self._can_move else held + [piece for piece in self._free if piece.share in lost]

    def have_ended(self, lost: Collection[int]) -> bool:
        """Returns True if no worker has a batch left, as long as these are lost."""
        return len(self.held) + len(self._free) == len(self.unread(lost))


class WorkerFeed:
    """Each worker reads its share of a pass; how far they are.

    A worker's thread alone changes what concerns this worker, and the main thread begins the pass.

    Args:
      dataset: the data.
      number: of the pass; see `WorkerDataset.begin_pass`.

    Attributes:
      in_step: True if a step reads its batch itself, from the iterator on its worker. Each worker's number of batches
        is known then before they are read. Else the batch is an argument of the step.
      is_counted: True if the number of batches of the pass is known or infinite.
      pieces: which worker reads what.
      ended: True once no worker has a batch left.
      on_workers: the iterators on the workers, once `begin` has made them.
      updates: number of updates to which all workers contribute, each with its part of one batch.
      marks_end: see `WorkerDataset`.
      at_end: workers that have read the element that was marked as the last one of their own share.
    """

    def __init__(self, dataset: WorkerDataset, number: int) -> None:
        self._dataset = dataset
        self.is_counted = dataset.cardinality != tf.data.UNKNOWN_CARDINALITY
        self.in_step = self.is_counted and dataset.share(0) is not None
        self.pieces = Pieces(dataset.share_sizes(), dataset.can_move)
        self._pass = Pass(number, self.pieces.readers if dataset.can_move else None)
        # By worker, a piece of another share, and the iterator over it.
        self._opened: dict[int, tuple[Piece, Any]] = {}
        self.ended = False
        self.marks_end = dataset.marks_end
        self.at_end: set[int] = set()
        self.on_workers: tf.distribute.coordinator.PerWorkerValue | None = None
        self.updates = 0
        # By worker, the parts that it has read.
        self._taken = collections.Counter[int]()

    def begin(self) -> tf.distribute.coordinator.PerWorkerValue:
        """Makes the iterators on the workers, unless they are there; returns them."""
        if self.on_workers is None:
            self.on_workers = self._dataset.iterate_on_workers(self._pass, self._position)
        return self.on_workers

    def claim(self, worker: int, lost: Callable[[], Collection[int]]) -> Piece | None:
        """Returns the piece that `worker` reads, which has a batch left or is of unknown length; None if there is none.

        Args:
          worker: its index.
          lost: returns workers that were lost; called if it has read its piece to the end.
        """
        piece = self.pieces.held.get(worker)
        if piece is None:
            for each in lost():
                self.release(each)
            piece = self.pieces.claim(worker)
        # Of data sets that a user made for each worker, some may be endless and others of unknown length.
        while piece is not None and piece.left == 0 and self.in_step:
            self.pieces.end(worker)
            piece = self.pieces.claim(worker)
        return piece

    def opened(self, worker: int, piece: Piece) -> Any:
        """Returns the iterator of `worker`, in whose thread this is called, over a piece of another share."""
        opened, iterator = self._opened.get(worker, (None, None))
        if opened is not piece:
            self._pass.is_irregular = True
            iterator = self._dataset.iterate_piece(self._pass, piece.share, piece.position, piece.step)
            self._opened[worker] = piece, iterator
        return iterator

    def took(self, worker: int) -> None:
        """Notes that `worker` has read a part for an update; a second one, if a contribution was withdrawn."""
        self._taken[worker] += 1
        self._pass.is_irregular |= self._taken[worker] > self.updates

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost, with its iterators."""
        self._pass.is_irregular = True
        self.pieces.release(worker)
        self._opened.pop(worker, None)

    def _position(self, worker: int) -> int:
        """Returns the number of batches of its share that a worker skips; called again when it is restarted."""
        self._opened.pop(worker, None)
        self.at_end.discard(worker)
        return self.updates - 1 if self.updates else self.pieces.own[worker].used

    @property
    def num_missing(self) -> int:
        """Number of batches of the pass that were not used; 0 if their number is not known."""
        return max(0, self._dataset.cardinality - self.pieces.num_used)

    def loss(self, gone: set[int]) -> str | None:
        """Describes the unused batches of lost workers, after the pass; None if there are none.

        Args:
          gone: The workers that are still lost.
        """
        workers = {piece.share for piece in self.pieces.unread(gone) if piece.left != 0}
        # Of endless data no batch is missing.
        if not workers or (self.is_counted and not self.num_missing):
            return None
        total = self._dataset.cardinality
        what = f"{self.num_missing} of its {total} batches" if self.is_counted else "an unknown number of batches"
        names = " and ".join(f"worker:{worker}" for worker in sorted(workers))
        return (
            f"Pass {self._pass.reads + 1} over the data ended without {what}. {names} was lost, and no other worker "
            "can read its own data; give fit the data set itself, and the others take over its share."
        )


class ChiefFeed:
    """The chief reads a pass, in order; a batch is read before the handle for it is given.

    So the end is known before a step begins. A step that fails at the end would discard the results of the other steps
    of its execution (`steps_per_execution`).

    Args:
      source: iterates over the data.

    Attributes:
      ended: True once the end of the data was read.
      updates: see `WorkerFeed`; here each update has a batch.
      predictions: steps of `predict` that were begun ahead of the handles for them.
    """

    in_step = False

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self.ended = False
        self.updates = 0
        self.predictions: collections.deque[Any] = collections.deque()
        self._waiting: collections.deque[list[tf.Tensor]] = collections.deque()
        # Numbers of batches taken ahead of their handles, and of handles whose batch was taken.
        self._ahead = self._redeemed = 0
        self._reading = threading.RLock()

    def has_next(self, given: int) -> bool:
        """Returns True if there is a batch for another handle than these."""
        with self._reading:
            while len(self._waiting) + self._ahead <= given - self._redeemed:
                try:
                    self._waiting.append(self._read())
                except tf.errors.OutOfRangeError:
                    return False
            return True

    def next_batch(self) -> list[tf.Tensor]:
        """Returns the next batch, flat, possibly before its handle exists; any thread may call it.

        Raises:
          tf.errors.OutOfRangeError: the data have ended.
        """
        with self._reading:
            batch = self._waiting.popleft() if self._waiting else self._read()
            self._ahead += 1
            return batch

    def redeem(self) -> None:
        """Counts a handle whose batch was taken."""
        with self._reading:
            self._ahead -= self._ahead > 0
            self._redeemed += 1

    def _read(self) -> list[tf.Tensor]:
        try:
            batch = next(self._source)
        except StopIteration:
            self.ended = True
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None
        return splitting.flat(batch)


Feed = WorkerFeed | ChiefFeed


class Batch:
    """State of one batch, for the lifetime of its handles.

    Args:
      iterator: the pass.
    """

    def __init__(self, iterator: WorkerIterator):
        self.iterator = iterator
        # True if a step has read the batch, or was given the chief's value.
        self.is_used = False
        # Flat, on the worker that has read it.
        self.on_worker: Sequence[tf.Tensor] | None = None
        # Flat, on the chief.
        self.on_chief: Sequence[Any] | None = None

    def values(self) -> list[tf.Tensor]:
        """Returns the batch on the chief, flat; waits for a step in flight that has it."""
        if self.on_chief is None:
            self.on_chief = self._fetch() if self.is_used else self.iterator.read_for_chief()
            self.is_used = True
        return list(self.on_chief)

    def _fetch(self) -> list[tf.Tensor]:
        self.iterator.engine.barrier()
        if not self.on_worker:
            raise RuntimeError(
                "strategy.run was given a batch that one of Keras' own steps has used before; give it to one "
                "function that does both, or take another batch."
            )
        with tf.device(CHIEF_DEVICE):
            return [tf.identity(tensor) for tensor in self.on_worker]


class WorkerIterator(HandleIterator):
    """The chief's iterator of one pass over a `WorkerDataset`. `next` returns handles, never data.

    Args:
      engine: the engine that makes the steps, and reads a batch of a worker by `read_batch`.
      dataset: the data.
      by_execution: True if one handle may stand for all batches of an execution of Keras (`steps_per_execution`).

    Attributes:
      feed: who reads the batches; None until it is decided.
      is_last: True if the last handle was the last one of the pass, or of an epoch of a given number of steps. If the
        chief reads data of unknown length, the end is known once the batch of the handle is taken (`chief_batch`).
    """

    def __init__(self, engine: Any, dataset: WorkerDataset, by_execution: bool = False):
        self.engine = engine
        self.dataset = dataset
        # Number of the pass, for its order.
        self.number = dataset.begin_pass()
        self._by_execution = by_execution
        call = calls.current()
        # Name of Keras' method; "" in a user's loop.
        self._loop = "" if call is None else call.kind
        self._epochs = fit.EpochIterator.of_steps(call)
        self._cardinality = dataset.cardinality
        self._handles_given = 0
        self.feed: Feed | None = None
        self.is_last = False

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self.dataset.element_spec

    def decide(self, by_chief: bool) -> Feed:
        """Returns the feed; decides about it if that was not done.

        Args:
          by_chief: whether the chief is to read the data, which it does anyway if they live in its Python.
        """
        if self.feed is None:
            is_by_chief = by_chief or self.dataset.lives_in_python
            source = self.dataset.local_iterator(self.number) if is_by_chief else None
            self.feed = WorkerFeed(self.dataset, self.number) if source is None else ChiefFeed(source)
        return self.feed

    def next_handle(self) -> WorkerBatch | None:
        """See `HandleIterator`."""
        check_eager("next(iterator)")
        # A user's loop ends at the end of the data, which only a reader detects.
        if self._loop == "predict" or (not self._loop and self._cardinality == tf.data.UNKNOWN_CARDINALITY):
            self.decide(by_chief=True)
        has_next = self.take_handle(1, decides=False) is not None
        return WorkerBatch(self.dataset.kind, Batch(self)) if has_next else None

    def take_handle(self, wanted: int, decides: bool = True) -> WorkerBatch | None:
        """See `HandleIterator.take_handle`: one handle for several batches where a worker reads its share by itself.

        Args:
          wanted: number of batches, at most.
          decides: False if the first use of a batch decides about the feed.
        """
        given, feed = self._handles_given, self.feed
        if given == self._cardinality:
            return None
        if feed is None and decides:
            feed = self.decide(by_chief=self._loop != "fit")
        if feed is not None and (not feed.has_next(given) if isinstance(feed, ChiefFeed) else feed.ended):
            return None
        if feed is None or not (self._by_execution and feed.in_step):
            wanted = 1
        self.count = min(wanted, self._cardinality - given) if self._cardinality > 0 else wanted
        self._handles_given = given = given + self.count
        self.is_last = given == self._cardinality or bool(self._epochs and self._epochs.is_at_end_of_epoch)
        return self.dataset.next_one

    def chief_batch(self, feed: ChiefFeed) -> list[tf.Tensor]:
        """Returns the batch of the last handle, flat, which the chief reads; reads ahead if only that shows the end."""
        batch = feed.next_batch()
        feed.redeem()
        if self._cardinality == tf.data.UNKNOWN_CARDINALITY:
            self.is_last |= not feed.has_next(self._handles_given)
        return batch

    def read_for_chief(self) -> list[Any]:
        """Returns the next batch, flat, for use on the chief."""
        feed = self.decide(by_chief=True)
        if isinstance(feed, WorkerFeed):
            return list(self.engine.read_batch(feed, self.dataset.next_one))
        batch = feed.next_batch()
        feed.redeem()
        return batch
