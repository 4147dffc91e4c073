# SPDX-License-Identifier: Apache-2.0
"""The data of a warmup phase: what this process reads of each batch, and the parts of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import handle as handles
from tfdist.data import splitting


class WarmupDataset(handles.CountedDataset):
    """A data set that begins with the phase.

    Args:
      engine: opens passes over it.
      whole: the data set as the strategy makes it without a phase.
      datasets: what this process reads in the phase: parts of batches, by a data set for each of its replicas; or else
        one data set, of tuples that begin with their parts.
      is_whole: whether it is one data set of whole batches instead, of which each replica takes its part.
      is_same_length: whether all processes come to the end of the data in the same step.
    """

    def __init__(
        self, engine: Any, whole: Any, datasets: Sequence[tf.data.Dataset], is_whole: bool, is_same_length: bool
    ) -> None:
        super().__init__(engine, tf.data.Dataset.zip(tuple(datasets)), lambda: whole)
        self.datasets = datasets
        self.is_whole = is_whole
        self.is_same_length = is_same_length

    @property
    def passes(self) -> int:
        """Number of iterators that were opened over the data, those that `whole` counts included."""
        return self.opened + (self.whole.passes if isinstance(self.whole, handles.CountedDataset) else 0)

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `DistributedDataset.raised_in_step`."""
        return self.whole.raised_in_step(error) if isinstance(self.whole, handles.DistributedDataset) else None


class Pass(handles.HandleIterator):
    """One pass of `fit` that begins in the phase.

    Args:
      dataset: the data set.
      begin_update: given this pass, returns the next handle, None at the end, or what makes the handles from now on.

    Attributes:
      element_spec: structure of `tf.TypeSpec`s of an element.
      left: number of batches that are left; below zero if it is not known, or there is no end.
    """

    left = 0

    def __init__(self, dataset: WarmupDataset, begin_update: Callable[[Pass], Any]) -> None:
        super().__init__()
        self.dataset = dataset
        self.element_spec = dataset.datasets[0].element_spec
        self._begin_update = begin_update
        self._iterators: list[Any] = []
        self._ahead: list[Any] = []
        self._num_skipped = 0
        self._kinds: dict[Any, handles.HandleKind] = {}
        self._rest: handles.HandleIterator | None = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if not self._iterators:
            # Not before the first handle is asked for: Keras makes iterators that it never uses. But also where all
            # batches are left to others: a shuffle draws a new order for each iterator.
            self._iterators = [iter(dataset) for dataset in self.dataset.datasets]
            self.left = self.dataset.cardinality
            self.dataset.opened += 1
        if self._rest is None:
            found = self._begin_update(self)
            if not isinstance(found, handles.HandleIterator):
                return found
            self._rest = found
        return self._rest.next_handle()

    def has_next(self) -> bool:
        """True if there is another batch, which is read ahead if their number is not known."""
        if self.left == tf.data.UNKNOWN_CARDINALITY and not self._ahead:
            try:
                self._ahead = _read(self._iterators)
            except tf.errors.OutOfRangeError:
                self.left = 0
        return self.left != 0

    def iterators(self) -> list[Any]:
        """The iterators, past the batches that were skipped."""
        for _ in range(self._num_skipped):
            _read(self._iterators)
        self._num_skipped = 0
        return self._iterators

    def handle(self, engine: Any, count: int, is_read: bool) -> handles.BatchHandle:
        """A handle of the next batch, which there is.

        Args:
          engine: runs the step.
          count: number of replicas that take part.
          is_read: whether this process reads it, or the step from the iterators, which is quicker; if not, it is read
            when a later one is.
        """
        content = (self._ahead or self.iterators()) if is_read else []
        self._num_skipped += not (is_read or self._ahead)
        self._ahead = []
        self.left -= self.left > 0
        # Each kind is looked up once in a pass: this is on the way of every step.
        key = count, _is_to_be_read(content)
        if key not in self._kinds:
            specs = [tf.type_spec_from_value(each) if key[1] else self.element_spec for each in content]
            self._kinds[key] = handles.registry.kind(engine, self.element_spec, (count, self.dataset.is_whole), specs)
        return self._kinds[key].handle(content)


def parts_of(content: list[Any], is_whole: bool, replicas: Sequence[int], num_replicas: int) -> list[Any]:
    """The parts of this process' replicas, in a graph or outside.

    Args:
      content: of a handle.
      is_whole: see `WarmupDataset`.
      replicas: numbers of this process' replicas.
      num_replicas: number of replicas in all processes.
    """
    with tf.device("/device:CPU:0"):
        if _is_to_be_read(content):
            content = _read(content)
        if is_whole:
            parts = [splitting.cut(content[0], replica, num_replicas) for replica in replicas]
        else:
            parts = content if len(content) > 1 else content[0][: len(replicas)]
    return [handles.without_optionals(part) for part in parts]


def _read(iterators: Sequence[Any]) -> list[Any]:
    return [iterator.get_next() for iterator in iterators]


def _is_to_be_read(content: Sequence[Any]) -> bool:
    return bool(content) and isinstance(content[0], tf.data.Iterator)
