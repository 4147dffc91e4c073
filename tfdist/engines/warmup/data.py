# SPDX-License-Identifier: Apache-2.0
"""The data of a warmup phase: what this process reads of each batch, and the handles that say what is done with it.

A pass over the data that begins in the phase goes on with the same iterator when the phase is over, so that all
replicas are at the same batch; a pass that begins afterwards is one of the strategy without a warmup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import values_of_replicas
from tfdist.data import handle as handles
from tfdist.data import splitting
from tfdist.data.replica_batches import ReplicaDataset

# Of more parts than a batch has examples the first one is empty.
_MANY = 2**40

Rest = Callable[[Any, int, Any], handles.HandleIterator]


class Source:
    """One pass over the data, of which this process reads the parts of its replicas.

    Attributes:
      part_spec: the structure of `tf.TypeSpec`s of a part.
      kinds: those of the handles that were given, by their form.
    """

    def __init__(self, part_spec: Any) -> None:
        self.part_spec = part_spec
        self.kinds: dict[Any, handles.HandleKind] = {}

    def has_next(self, is_rest: bool) -> bool:
        """Whether there is another batch; where the rest begins with it, true also if the rest itself will tell."""
        raise NotImplementedError

    def have_all_next(self, is_rest: bool) -> bool:
        """Whether all processes have another batch; all ask at once."""
        return self.has_next(is_rest)

    def take(self) -> list[Any]:
        """The parts of the next batch, which there is."""
        raise NotImplementedError

    def skip(self) -> None:
        """Leaves the next batch, which there is, to other processes."""
        self.take()

    def alone(self) -> Any:
        """The first replica's part of the next batch, or a `tf.data.Iterator` to read it from."""
        return self.take()[0]

    def rest(self) -> Any:
        """Returns a `HandleIterator` over the rest of this pass; None if no other engine goes on with it."""
        return None


class PartSource(Source):
    """Reads a data set whose elements are parts of batches.

    Args:
      dataset: what this process reads.
      parts_of: gives the parts that an element is of.
      part_spec: see `Source`.
      have_all: given whether this process has another batch, says whether all have; None if that is the same.
      rest: given the iterator, the number of batches left and the data set's element spec, returns what `Source.rest`
        does; all processes then hear of the end of the data from there.
      group: how many elements of the data set make one here.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        parts_of: Callable[[Any], list[Any]],
        part_spec: Any,
        have_all: Callable[[bool], bool] | None = None,
        rest: Rest | None = None,
        group: int = 1,
    ) -> None:
        super().__init__(part_spec)
        self._element_spec = dataset.element_spec
        # Opened also where the batches are left to others: a shuffle draws a new order whenever that is done.
        self._iterator: Any = iter(dataset)
        self._group = group
        if group > 1:
            # Takes them from one iterator in turn.
            self._iterator = zip(*[self._iterator] * group, strict=False)
        self._parts_of = parts_of
        self._have_all = have_all
        self._rest = rest
        # Below zero: the number is not known, or there is no end.
        cardinality = int(dataset.cardinality())
        self._left = cardinality // group if cardinality > 0 else cardinality
        self._left_to_others = 0
        self._ahead: Any = None

    def has_next(self, is_rest: bool) -> bool:
        """See `Source`. If the number of batches is not known, it reads the next one to find out."""
        if self._left != tf.data.UNKNOWN_CARDINALITY or (is_rest and self._rest):
            return self._left != 0
        if self._ahead is None:
            self._ahead = next(self._iterator, None)
        return self._ahead is not None

    def have_all_next(self, is_rest: bool) -> bool:
        """See `Source`."""
        has_next = self.has_next(is_rest)
        return has_next if self._have_all is None or (is_rest and self._rest) else self._have_all(has_next)

    def skip(self) -> None:
        """See `Source`. It is not read before it must be."""
        self._left_to_others += self._ahead is None
        self._ahead = None
        self._left -= self._left > 0

    def take(self) -> list[Any]:
        """See `Source`."""
        self._catch_up()
        element = next(self._iterator) if self._ahead is None else self._ahead
        self._ahead = None
        self._left -= self._left > 0
        return self._parts_of(element)

    def alone(self) -> Any:
        """See `Source`. The step reads the batch if it can, which spares Keras' loop a good part of a small step."""
        if self._group > 1 or self._ahead is not None or self._left_to_others:
            return super().alone()
        self._left -= self._left > 0
        return self._iterator

    def rest(self) -> Any:
        """See `Source`."""
        self._catch_up()
        return self._rest and self._rest(self._iterator, self._left, self._element_spec)

    def _catch_up(self) -> None:
        for _ in range(self._left_to_others):
            next(self._iterator)
        self._left_to_others = 0


class ReplicaSource(Source):
    """Reads a `ReplicaDataset`, whose handles make the rest of the pass.

    Args:
      dataset: the data set.
    """

    def __init__(self, dataset: ReplicaDataset) -> None:
        is_whole, num_parts = dataset.is_whole, dataset.num_parts
        super().__init__(splitting.part_spec(dataset.element_spec, num_parts) if is_whole else dataset.element_spec)
        self._iterator = iter(dataset)
        self._handle: Any = None

    def has_next(self, is_rest: bool) -> bool:
        """See `Source`."""
        del is_rest
        self._handle = self._handle or self._iterator.next_handle()
        return self._handle is not None

    def take(self) -> list[Any]:
        """See `Source`."""
        self._handle = None
        return self._iterator.take().parts()

    def rest(self) -> Any:
        """See `Source`."""
        return self

    def next_handle(self) -> Any:
        """See `HandleIterator`."""
        handle = self._handle if self.has_next(is_rest=True) else None
        self._handle = None
        return handle


def batch_of(parts: Sequence[Any], taking_part: Sequence[bool]) -> Any:
    """What each replica of this process trains on, as distributed values.

    Args:
      parts: the part of each.
      taking_part: whether each takes part, if not all replicas of all processes do: the others get no example.
    """
    if taking_part:
        # All processes must see from the shapes that replicas have different numbers of examples.
        pairs = zip(parts, taking_part, strict=True)
        parts = [_of_any_size(part) if takes else splitting.cut(part, 0, _MANY) for part, takes in pairs]
    return values_of_replicas.of([handles.without_optionals(part) for part in parts])


def parts_of(dataset: tf.data.Dataset, num_parts: int) -> tf.data.Dataset:
    """All parts of each batch of a data set: tuples."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def cut(*element: Any) -> tuple[Any, ...]:
        batch = element if is_tuple else element[0]
        return tuple(splitting.cut(batch, part, num_parts) for part in range(num_parts))

    return dataset.map(tf.autograph.experimental.do_not_convert(cut)).prefetch(1)


def _of_any_size(part: Any) -> Any:
    def forget(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape.as_list()[1:]])

    return tf.nest.map_structure(forget, part)
