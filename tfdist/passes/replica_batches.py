# SPDX-License-Identifier: Apache-2.0
"""The batches that the replicas of one process read, and the handles by which Keras' loop speaks of them.

In a train step each replica takes its own part of the batch in its own thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import calls
from tfdist.passes import handle as handles
from tfdist.passes import splitting


class ReplicaDataset(handles.CountedDataset):
    """A data set whose batches are divided among the replicas. It is read once, in order.

    Args:
      engine: runs the steps on its batches.
      dataset: yields global batches.
      num_parts: how many replicas there are.
      whole: see `DistributedDataset`.
    """

    is_whole = True

    def __init__(self, engine: Any, dataset: tf.data.Dataset, num_parts: int, whole: Callable[[], Any]) -> None:
        splitting.check_batched(dataset.element_spec, num_parts)
        super().__init__(engine, dataset.prefetch(1), whole)
        self.num_parts = num_parts
        self.kind = handles.kind_of(engine, self.element_spec, (num_parts, self.is_whole))

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a whole batch, or of a part if it has no whole ones."""
        return self.own.element_spec

    @property
    def part_spec(self) -> Any:
        """See `DistributedDataset.part_spec`."""
        return splitting.part_spec(self.element_spec, self.num_parts) if self.is_whole else self.element_spec

    @property
    def in_graphs(self) -> Any:
        """See `DistributedDataset.in_graphs`."""
        return handles.refuse_graph()

    @property
    def is_left_to_stock(self) -> bool:
        """True in a call that reads the data set `whole`: of another method than `fit`."""
        call = calls.current()
        return call is not None and not call.trains

    def iterate(self) -> ReplicaIterator:
        """Opens a pass over the data.

        Not at its first batch: Keras makes iterators that it never reads, and each of a shuffle draws an order.
        """
        self.opened += 1
        return ReplicaIterator(self, iter(self.own))

    def rest(self, iterators: Sequence[Iterator[Any]], left: int) -> ReplicaIterator:
        """See `CountedDataset.rest`."""
        del left
        return ReplicaIterator(self, iterators[0])


class ReplicaDatasetFromFunction(ReplicaDataset):
    """Data sets that the user made, one for each replica, which reads it in its own thread: slow data make it late.

    A pass ends with the first replica whose data end.

    Args:
      engine: runs the steps on its batches.
      datasets: one for each replica, of its parts, all of one structure.
      whole: see `DistributedDataset`.
    """

    is_whole = False

    def __init__(self, engine: Any, datasets: Sequence[tf.data.Dataset], whole: Callable[[], Any]) -> None:
        super().__init__(engine, datasets[0], len(datasets), whole)
        self.datasets = [dataset.prefetch(1) for dataset in datasets]

    @property
    def cardinality(self) -> int:
        """See `DistributedDataset.cardinality`: of what the call that asks reads."""
        if self.is_left_to_stock:
            return int(self.whole.cardinality)
        return int(tf.data.Dataset.zip(tuple(self.datasets)).cardinality())

    def iterate(self) -> ReplicaIterator:
        """See `ReplicaDataset.iterate`."""
        self.opened += 1
        return _OwnIterator(self, [iter(dataset) for dataset in self.datasets], self.cardinality)

    def rest(self, iterators: Sequence[Iterator[Any]], left: int) -> ReplicaIterator:
        """See `CountedDataset.rest`; an iterator for each replica."""
        return _OwnIterator(self, iterators, left)


class ReplicaIterator(handles.HandleIterator):
    """One pass over a `ReplicaDataset`, or the rest of one that a source was opened for."""

    def __init__(self, dataset: ReplicaDataset, source: Iterator[Any]) -> None:
        self._dataset = dataset
        self._source = source
        # The batch of the next handle, or the error in place of it.
        self._ahead: Any = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        handles.check_eager("next(iterator)")
        if self._ahead is None:
            self.read_ahead()
        batch, self._ahead = self._ahead, None
        if isinstance(batch, StopIteration):
            return None
        if isinstance(batch, Exception):
            raise batch
        return handles.BatchHandle(self._dataset.kind, self, batch)

    def read_ahead(self) -> None:
        """Reads the batch for the next handle, if that was not done; `next` raises what goes wrong."""
        if self._ahead is not None:
            return
        try:
            self._ahead = next(self._source)
        except Exception as error:
            self._ahead = error

    def flat(self, handle: handles.BatchHandle, replica: int) -> Sequence[tf.Tensor]:
        """Returns a replica's input as a flat list: the whole batch, of which it cuts out its part; in its thread."""
        del replica
        return splitting.flat(handle.whole)

    def rows(self, handle: handles.BatchHandle, replica: int) -> int:
        """Returns the number of examples in a replica's part, after `flat`; 0 if it is not known."""
        size, num_parts = splitting.static_size(handle.whole) or 0, self._dataset.num_parts
        return size * (replica + 1) // num_parts - size * replica // num_parts


class _OwnIterator(ReplicaIterator):
    """One pass over a `ReplicaDatasetFromFunction`: gives handles without reading."""

    def __init__(self, dataset: ReplicaDatasetFromFunction, own: Sequence[Iterator[Any]], count: int) -> None:
        # Counts only: the replicas read.
        super().__init__(dataset, itertools.repeat(True, count) if count >= 0 else itertools.repeat(True))
        self._own = own
        self._rows = [0] * len(own)

    def flat(self, handle: handles.BatchHandle, replica: int) -> Sequence[tf.Tensor]:
        """Returns the part that a replica reads next; raises `tf.errors.OutOfRangeError` at the end of its data."""
        try:
            part = next(self._own[replica])
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None
        self._rows[replica] = splitting.static_size(part) or 0
        return splitting.flat(part)

    def rows(self, handle: handles.BatchHandle, replica: int) -> int:
        """See `ReplicaIterator.rows`."""
        return self._rows[replica]
