# SPDX-License-Identifier: Apache-2.0
"""One pass over the data in the warmup phase: what this process reads of each batch, and the parts of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import handle as handles
from tfdist.data import splitting

# What the elements of the data sets are: whole batches, of which each replica takes its part; parts of this process'
# replicas, read in turn from one data set or each from its own; or pairs of a part and a number of examples.
BATCHES, PARTS, PAIRS = "batches", "parts", "pairs"


class Batches:
    """Reads one pass.

    Args:
      datasets: one for all replicas of this process, or one for each.
      elements: kind of their elements, such as `PARTS`.
      num_replicas: number of replicas of this process.
      is_same_length: whether all processes come to the end of the data in the same step.

    Attributes:
      element_spec: structure of `tf.TypeSpec`s of an element.
      left: number of batches that are left; below zero if it is not known, or there is no end.
    """

    def __init__(
        self, datasets: Sequence[tf.data.Dataset], elements: str, num_replicas: int, is_same_length: bool
    ) -> None:
        self.elements = elements
        self.is_same_length = is_same_length
        self.element_spec = datasets[0].element_spec
        # Opened also where all batches are left to others: a shuffle draws a new order for each iterator.
        self._iterators = [iter(dataset) for dataset in datasets]
        self._num_elements = _num_elements(elements, num_replicas)
        self.left = splitting.num_batches(datasets, self._num_elements // len(datasets))
        self._ahead: list[Any] | None = None
        self._num_skipped = 0
        self._kinds: dict[Any, handles.HandleKind] = {}

    def has_next(self) -> bool:
        """True if there is another batch, which is read ahead if their number is not known."""
        if self._ahead is None and self.left == tf.data.UNKNOWN_CARDINALITY:
            try:
                self._ahead = _read(self._iterators, self._num_elements)
            except tf.errors.OutOfRangeError:
                self.left = 0
        return self.left != 0

    def skip(self) -> list[Any]:
        """Leaves the next batch, which there is, to other processes; it is not read before it must be."""
        self._num_skipped += self._ahead is None
        return self._passed([])

    def take(self) -> list[Any]:
        """The elements of the next batch, which there is, or the iterators to read them from in the step: sooner."""
        return self._passed(self.iterators() if self._ahead is None else self._ahead)

    def iterators(self) -> list[Any]:
        """The iterators, past the batches that were skipped."""
        for _ in range(self._num_skipped):
            _read(self._iterators, self._num_elements)
        self._num_skipped = 0
        return self._iterators

    def _passed(self, content: list[Any]) -> list[Any]:
        self._ahead = None
        self.left -= self.left > 0
        return content

    def handle(self, engine: Any, form: Any, content: list[Any]) -> handles.BatchHandle:
        """A handle of this form for the result of `take` or `skip`. Each kind is looked up once in a pass."""
        key = form, _is_to_be_read(content)
        if key not in self._kinds:
            spec = tf.type_spec_from_value if _is_to_be_read(content) else lambda element: self.element_spec
            self._kinds[key] = handles.registry.kind(engine, self.element_spec, form, [spec(each) for each in content])
        return self._kinds[key].handle(content)


def parts_of(content: list[Any], elements: str, replicas: Sequence[int], num_replicas: int) -> list[Any]:
    """The parts of this process' replicas, in a graph or outside.

    Args:
      content: result of `Batches.take`.
      elements: kind of its elements, such as `BATCHES`.
      replicas: numbers of this process' replicas.
      num_replicas: number of replicas in all processes.
    """
    with tf.device("/device:CPU:0"):
        if _is_to_be_read(content):
            content = _read(content, _num_elements(elements, len(replicas)))
        if elements == BATCHES:
            content = [splitting.cut(content[0], replica, num_replicas) for replica in replicas]
    return [handles.without_optionals(each[0] if elements == PAIRS else each) for each in content]


def _num_elements(elements: str, num_replicas: int) -> int:
    """The number of elements that a process with so many replicas reads of each batch."""
    return 1 if elements == BATCHES else num_replicas


def _read(iterators: Sequence[Any], num_elements: int) -> list[Any]:
    return [iterator.get_next() for iterator in iterators for _ in range(num_elements // len(iterators))]


def _is_to_be_read(content: Sequence[Any]) -> bool:
    return bool(content) and isinstance(content[0], tf.data.Iterator)
