# SPDX-License-Identifier: Apache-2.0
"""What the replicas of one process read, and the tickets by which Keras' loop speaks of it.

Keras' loop gets a ticket for each batch, and gives it to `strategy.run`. There it is redeemed: in a train step each
replica takes its own part in its own thread; for any other function the parts become ordinary distributed values.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, input_lib

from tfdist.engines import sharing

_iterators: weakref.WeakValueDictionary[int, ReplicaIterator] = weakref.WeakValueDictionary()
_iterator_ids = itertools.count()
_element_specs: dict[str, Any] = {}


class ReplicaBatch(tf.experimental.ExtensionType, tf.distribute.DistributedValues):
    """A ticket for one batch, of which every replica reads its part.

    It stands for the batch in `strategy.run(fn, args=(batch,))`; inside `fn` it is the replica's part.

    Attributes:
      iterator_id: int64 scalar, the `ReplicaIterator` it comes from.
      num_parts: how many replicas there are.
      is_whole: whether replicas are given the whole batch, to cut their parts out of it.
      structure: what the whole batch, or else a part, looks like, so that a `tf.function` is traced anew for another.
    """

    iterator_id: tf.Tensor
    num_parts: int
    is_whole: bool
    structure: str

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the whole batch, or of a part."""
        return _element_specs[self.structure]

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "Under policies a batch can't be unpacked outside of the replicas; give it whole to "
            "strategy.run(fn, args=(batch,)) and unpack it inside fn."
        )

    def redeem(self) -> Any:
        """The batch as distributed values, in a graph or outside; None where Keras has an empty Optional."""
        if tf.executing_eagerly():
            parts = find_iterator(int(self.iterator_id)).take().parts()
            return distribute_utils.regroup([tf.nest.map_structure(_none_if_optional, part) for part in parts])
        spec = sharing.part_spec(self.element_spec, self.num_parts) if self.is_whole else self.element_spec
        specs = _tensors(spec) * self.num_parts
        tensors = tf.py_function(_read, [self.iterator_id], [each.dtype for each in specs])
        for tensor, each in zip(tensors, specs, strict=True):
            tensor.set_shape(each.shape)
        supply = iter(tensors)
        return distribute_utils.regroup([_packed(spec, supply) for _ in range(self.num_parts)])


def _read(iterator_id: tf.Tensor) -> list[tf.Tensor]:
    try:
        return [tensor for part in find_iterator(int(iterator_id)).take().parts() for tensor in _tensors(part)]
    except tf.errors.OutOfRangeError:
        # As the end of the data an operation passes on this one only.
        end = StopIteration("End of sequence")
    raise end


def _tensors(structure: Any) -> list[Any]:
    """The tensors, or their specs, of a batch."""
    leaves = [leaf for leaf in tf.nest.flatten(structure) if not _is_optional(leaf)]
    return tf.nest.flatten(leaves, expand_composites=True)


def _packed(spec: Any, tensors: Iterator[tf.Tensor]) -> Any:
    def pack(leaf: Any) -> Any:
        if _is_optional(leaf):
            return None
        count = len(tf.nest.flatten(leaf, expand_composites=True))
        return tf.nest.pack_sequence_as(leaf, list(itertools.islice(tensors, count)), expand_composites=True)

    return tf.nest.map_structure(pack, spec)


def _none_if_optional(leaf: Any) -> Any:
    return None if _is_optional(leaf) else leaf


def _is_optional(leaf: Any) -> bool:
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def find_iterator(iterator_id: int) -> ReplicaIterator:
    """Returns the iterator that a ticket came from."""
    return _iterators[iterator_id]


class WholeBatch:
    """A batch of which each replica cuts out its part.

    Args:
      batch: a global batch.
      num_parts: how many replicas there are.
    """

    def __init__(self, batch: Any, num_parts: int) -> None:
        self._batch = batch
        self._flat = tf.nest.flatten(batch, expand_composites=True)
        self._num_parts = num_parts

    def flat(self, replica: int) -> Sequence[tf.Tensor]:
        """What a replica is given, flat; called in its thread."""
        del replica
        return self._flat

    def rows(self, replica: int) -> int:
        """How many examples a replica that was given its part has; 0 if that is not known."""
        size = sharing.static_size(self._batch) or 0
        return size * (replica + 1) // self._num_parts - size * replica // self._num_parts

    def parts(self) -> list[Any]:
        """The parts of all replicas."""
        return [sharing.cut(self._batch, part, self._num_parts) for part in range(self._num_parts)]


class OwnParts:
    """What each replica reads from an iterator of its own, when it is asked for.

    Args:
      iterators: one for each replica.
    """

    def __init__(self, iterators: Sequence[Iterator[Any]]) -> None:
        self._iterators = iterators
        self._rows = [0] * len(iterators)

    def flat(self, replica: int) -> Sequence[tf.Tensor]:
        """See `WholeBatch.flat`. Raises `tf.errors.OutOfRangeError` at the end of the replica's data."""
        part = self._next(replica)
        self._rows[replica] = sharing.static_size(part) or 0
        return tf.nest.flatten(part, expand_composites=True)

    def rows(self, replica: int) -> int:
        """See `WholeBatch.rows`."""
        return self._rows[replica]

    def parts(self) -> list[Any]:
        """See `WholeBatch.parts`."""
        return [self._next(replica) for replica in range(len(self._iterators))]

    def _next(self, replica: int) -> Any:
        try:
            return next(self._iterators[replica])
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None


class ReplicaDataset(input_lib.DistributedDataset):
    """A data set whose batches are divided among the replicas. It is read once, in order, and gives out tickets.

    It says that it is the stock `DistributedDataset`, which shares nothing with it but its interface, because Keras
    goes by that class when it decides what `fit` takes.

    Args:
      dataset: yields global batches.
      num_parts: how many replicas there are.
    """

    is_whole = True

    def __init__(self, dataset: tf.data.Dataset, num_parts: int) -> None:
        sharing.check_batched(dataset.element_spec, num_parts)
        self.num_parts = num_parts
        self._dataset = dataset.prefetch(1)
        # How many iterators over the data were made.
        self.passes = 0

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a whole batch, or of a part if it has no whole ones."""
        return self._dataset.element_spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return int(self._dataset.cardinality())

    def __iter__(self) -> ReplicaIterator:
        if not tf.executing_eagerly():
            raise RuntimeError("iter(dataset) must be called outside of a tf.function where policies decide.")
        return self._iterator()

    def _iterator(self) -> ReplicaIterator:
        return ReplicaIterator(self)

    def read(self) -> Iterator[Any]:
        """Iterates over the whole batches, or over the parts of the first replica."""
        self.passes += 1
        return iter(self._dataset)


class ReplicaDatasetFromFunction(ReplicaDataset):
    """Data sets that the user made, one for each replica, which reads it in its own thread: slow data make it late.

    A pass ends with the first replica whose data end.

    Args:
      datasets: one for each replica, of its parts, all of one structure.
    """

    is_whole = False

    def __init__(self, datasets: Sequence[tf.data.Dataset]) -> None:
        super().__init__(datasets[0], len(datasets))
        self._datasets = [dataset.prefetch(1) for dataset in datasets]

    @property
    def cardinality(self) -> int:
        """See `ReplicaDataset.cardinality`."""
        counts = [int(dataset.cardinality()) for dataset in self._datasets]
        if tf.data.UNKNOWN_CARDINALITY in counts:
            return tf.data.UNKNOWN_CARDINALITY
        return min((count for count in counts if count >= 0), default=tf.data.INFINITE_CARDINALITY)

    def _iterator(self) -> ReplicaIterator:
        return _OwnIterator(self)

    def read_own(self) -> list[Iterator[Any]]:
        """An iterator for each replica."""
        return [iter(dataset) for dataset in self._datasets]


class ReplicaIterator:
    """One pass over a `ReplicaDataset`. `next` reads a batch and gives a ticket for it.

    It is no `tf.distribute.DistributedIterator`, because Keras would hand such a one into a `tf.function` as a whole
    instead of taking one batch at a time. It ends with `StopIteration`, or with `tf.errors.OutOfRangeError` where not
    one ticket was given since `iter(self)`: Keras zips over it `steps_per_execution` at a time, and tells the two
    apart.
    """

    def __init__(self, dataset: ReplicaDataset) -> None:
        self._dataset = dataset
        # Made when the first batch is wanted: Keras makes iterators that it never uses.
        self._source: Iterator[Any] | None = None
        self._waiting: collections.deque[Any] = collections.deque()
        # The batch after those, or the error in place of it.
        self._ahead: Any = None
        self._given_since_iter = 0
        self.id = next(_iterator_ids)
        structure = repr(dataset.element_spec)
        _element_specs.setdefault(structure, dataset.element_spec)
        self._ticket = ReplicaBatch(tf.constant(self.id, tf.int64), dataset.num_parts, dataset.is_whole, structure)
        _iterators[self.id] = self

    def __iter__(self) -> ReplicaIterator:
        self._given_since_iter = 0
        return self

    def __next__(self) -> ReplicaBatch:
        if self._ahead is None:
            self.read_ahead()
        batch, self._ahead = self._ahead, None
        if isinstance(batch, StopIteration) and not self._given_since_iter:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        if isinstance(batch, Exception):
            raise batch
        self._waiting.append(batch)
        self._given_since_iter += 1
        return self._ticket

    def read_ahead(self) -> None:
        """Reads the batch for the next ticket, if that was not done; `next` raises what goes wrong."""
        if self._ahead is not None:
            return
        try:
            self._source = self._source or self._dataset.read()
            self._ahead = next(self._source)
        except Exception as error:
            self._ahead = error

    def get_next(self) -> ReplicaBatch:
        """The same as `next(self)`."""
        return next(self)

    def example(self) -> Any:
        """A replica's part of the batch that is taken next: the last, which is not empty with one example."""
        num_parts = self._dataset.num_parts
        return sharing.cut(self._waiting[0], num_parts - 1, num_parts)

    def take(self) -> WholeBatch | OwnParts:
        """Redeems a ticket."""
        return WholeBatch(self._waiting.popleft(), self._dataset.num_parts)


class _OwnIterator(ReplicaIterator):
    """One pass over a `ReplicaDatasetFromFunction`: gives tickets without reading."""

    def __init__(self, dataset: ReplicaDatasetFromFunction) -> None:
        super().__init__(dataset)
        count = dataset.cardinality
        self._left = itertools.repeat(True, count) if count >= 0 else itertools.repeat(True)
        self._own: list[Iterator[Any]] | None = None
        self._datasets = dataset

    def read_ahead(self) -> None:
        """Counts only: the replicas read."""
        if self._ahead is None:
            self._ahead = next(self._left, StopIteration())

    def example(self) -> Any:
        """See `ReplicaIterator.example`. Zeros where they will do, because nobody is to wait for a slow pipeline."""
        spec = self._dataset.element_spec
        if all(_has_only_its_size_open(leaf) for leaf in tf.nest.flatten(spec)):
            return tf.nest.map_structure(lambda leaf: tf.zeros([1, *leaf.shape[1:]], leaf.dtype), spec)
        return next(self._dataset.read())

    def take(self) -> WholeBatch | OwnParts:
        """Redeems a ticket."""
        self._waiting.popleft()
        self._own = self._own or self._datasets.read_own()
        return OwnParts(self._own)


def _has_only_its_size_open(spec: Any) -> bool:
    is_number = isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string
    return is_number and spec.shape.rank is not None and spec.shape[1:].is_fully_defined()
