# SPDX-License-Identifier: Apache-2.0
"""The data of a strategy with a policy: this worker's part of each batch.

In `fit` an iterator returns handles, and reads nothing: a second thread reads the part when it computes a contribution.
Other loops (`evaluate`, `predict`, custom loops) use the stock iterator over batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data import handle as handles
from tfdist.data import splitting


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass of `fit` over the data.

    Attributes:
      number: the same on all workers.
      iterator: iterator over this worker's parts, read by the second thread only.
      kind: of the handles.
      made: updates since Keras began an execution of `steps_per_execution` steps.
    """

    number: int
    iterator: Any
    kind: handles.HandleKind
    made: int = 0

    def __post_init__(self) -> None:
        self.handle = self.kind.handle(handles.registry.open(self))


class PartIterator(handles.HandleIterator):
    """Iterator over the handles of one pass.

    It never ends if the number of batches is unknown or infinite; then `run` raises the end of the data.

    Args:
      begin: begins the pass, at the first handle: Keras makes iterators that it never uses.
      left: number of batches; below zero if it is unknown or infinite.
    """

    def __init__(self, begin: Callable[[], Pass], left: int) -> None:
        super().__init__()
        self._begin = begin
        self._left = left
        self._pass: Pass | None = None

    def __iter__(self) -> PartIterator:
        if self._pass is not None:
            self._pass.made = 0
        super().__iter__()
        return self

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._left == 0:
            return None
        self._pass = self._pass or self._begin()
        self._left -= self._left > 0
        return self._pass.handle


def part_of(dataset: tf.data.Dataset, part: int, num_parts: int) -> tf.data.Dataset:
    """Returns a data set of a worker's part of each batch, with the size of the whole batch."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def take(*element: Any) -> tuple[Any, tf.Tensor]:
        batch = element if is_tuple else element[0]
        return splitting.cut(batch, part, num_parts), tf.cast(splitting.rows(batch), tf.int64)

    return _in_order(dataset.map(tf.autograph.experimental.do_not_convert(take)))


def without_total(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set like `part_of` for a worker's own data; the size of the whole batch is unknown."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    pair = tf.autograph.experimental.do_not_convert(lambda *element: (element if is_tuple else element[0], ()))
    return _in_order(dataset.map(pair))


def _in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    # Workers with different orders of the batches would take overlapping parts.
    options.deterministic = True
    return dataset.with_options(options).prefetch(1)
