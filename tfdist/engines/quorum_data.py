# SPDX-License-Identifier: Apache-2.0
"""The data set of a strategy with a policy, which Keras' `fit` trains on without seeing its batches.

In `fit` an iterator gives `Ticket`s: `next` makes a round, in which this worker's part of a batch is read and computed
on by a second thread. Everybody else (`evaluate`, `predict`, a custom loop) gets the stock iterator over real batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdist.engines import fitting, sharing

if TYPE_CHECKING:
    from tfdist.engines.quorum import QuorumEngine
    from tfdist.engines.quorum_step import Ticket


class QuorumDataset(input_lib.DistributedDataset):
    """A data set of which each worker reads its part of every batch.

    It says that it is the stock `DistributedDataset`, because Keras goes by that class.

    Args:
      engine: makes the rounds.
      whole: the same data set as the stock strategy distributes it.
      part: this worker's part of each batch, and the number of examples in all parts, or () if nobody knows: a
        `tf.data.Dataset` of such pairs.
    """

    def __init__(self, engine: QuorumEngine, whole: Any, part: tf.data.Dataset) -> None:
        self._engine = engine
        self._whole = whole
        self._part = part
        # How many iterators over the parts were made.
        self.passes = 0

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._whole.element_spec

    @property
    def cardinality(self) -> int:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return int(self._part.cardinality())

    def __iter__(self) -> Any:
        frame = fitting.fit_frame() if tf.executing_eagerly() else None
        if frame is None:
            return iter(self._whole)
        return QuorumIterator(self._begin, int(self._part.cardinality()), frame.f_locals["self"])

    def _begin(self, model: keras.Model) -> Callable[[], Ticket | None]:
        """Begins a pass; returns what makes its tickets, and None at its end."""
        self.passes += 1
        begun = self._engine.begin(model, self._part)
        return lambda: self._engine.round(begun)


class QuorumIterator:
    """One pass of `fit`. `next` gives a ticket once an update can be made.

    It is no `tf.distribute.DistributedIterator`, because Keras would take such a one into a `tf.function`. It ends with
    `StopIteration`, or with `tf.errors.OutOfRangeError` where not one ticket was given since `iter(self)`: Keras zips
    over it `steps_per_execution` at a time, and tells the two apart.
    """

    def __init__(
        self, begin: Callable[[keras.Model], Callable[[], Ticket | None]], cardinality: int, model: keras.Model
    ) -> None:
        self._begin = begin
        self._model = model
        self._left = cardinality
        self._given_since_iter = 0
        self._round: Callable[[], Ticket | None] | None = None

    def __iter__(self) -> QuorumIterator:
        self._given_since_iter = 0
        return self

    def __next__(self) -> Ticket:
        ticket = self._next() if self._left != 0 else None
        if ticket is None:
            self._left = 0
            if self._given_since_iter:
                raise StopIteration
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        # Numbers below zero stand for an unknown or endless number.
        self._left -= self._left > 0
        self._given_since_iter += 1
        return ticket

    def _next(self) -> Ticket | None:
        if self._round is None:
            # Not before the first ticket is asked for: Keras makes iterators that it never uses.
            self._round = self._begin(self._model)
        return self._round()


def part_of(dataset: tf.data.Dataset, part: int, num_parts: int) -> tf.data.Dataset:
    """What a `QuorumDataset` reads: part number `part` of each batch, and the size of the whole batch."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def take(*element: Any) -> tuple[Any, tf.Tensor]:
        batch = element if is_tuple else element[0]
        return sharing.cut(batch, part, num_parts), tf.cast(sharing.rows(batch), tf.int64)

    return _in_order(dataset.map(tf.autograph.experimental.do_not_convert(take)))


def without_total(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same for a data set of this worker's own, of which nobody knows what the others have."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    pair = tf.autograph.experimental.do_not_convert(lambda *element: (element if is_tuple else element[0], ()))
    return _in_order(dataset.map(pair))


def _in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    # Workers that process the same batches in different orders would take overlapping parts.
    options.deterministic = True
    return dataset.with_options(options).prefetch(1)
