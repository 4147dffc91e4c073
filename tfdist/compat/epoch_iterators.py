# SPDX-License-Identifier: Apache-2.0
"""Keras' epoch iterator, by which a running `fit` counts its steps and batches, and its beginning in mid-epoch.

There is no public way: `fit` shows the iterator to nobody, and begins each epoch with its first step. What is changed
here is changed on that one iterator, which ends with its `fit`; a replaced method removes itself when it was called
once, or stays as long as the iterator lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.compat import calls, own_attributes

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._current_iterator",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._distributed_dataset",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._enumerate_iterator",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._get_iterator",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._interrupted_warning",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._num_batches",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._steps_seen",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.data_adapter",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.steps_per_epoch",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.steps_per_execution",
    "keras:Model._initial_epoch",
)


class EpochIterator:
    """The epoch iterator of one `fit`.

    Args:
      iterator: Keras' own.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    @classmethod
    def of(cls, model: keras.Model) -> EpochIterator | None:
        """Returns the epoch iterator of an open `fit` of this model in this thread; None if there is none."""
        fit = calls.fit_of(model)
        return None if fit is None or fit.epochs is None else cls(fit.epochs)

    @property
    def dataset(self) -> Any:
        """The distributed data set that it iterates over."""
        return self._iterator._distributed_dataset

    @property
    def num_batches_given(self) -> int | None:
        """Number of batches in a pass, if the data given to `fit` have a known length."""
        return self._iterator.data_adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of examples in a batch, if all but the last one have the same."""
        return getattr(self._iterator.data_adapter, "batch_size", None)

    @property
    def num_batches(self) -> int | None:
        """The same, or what was found out at the end of a pass."""
        return self._iterator._num_batches

    @num_batches.setter
    def num_batches(self, count: int | None) -> None:
        self._iterator._num_batches = count

    @property
    def batches_taken(self) -> int:
        """Number of batches taken from the newest iterator over the data."""
        return self._iterator._steps_seen

    @property
    def goes_on(self) -> bool:
        """True if the next epoch continues with the same iterator over the data, as with `steps_per_epoch`."""
        return self._iterator.steps_per_epoch is not None and self._iterator._current_iterator is not None

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True if the last step is known to be the end of its epoch."""
        length, taken = self._length, self._iterator._steps_seen
        return bool(length) and taken >= length and taken % length == 0

    @property
    def _length(self) -> int | None:
        return self._iterator.steps_per_epoch or self._iterator._num_batches

    def replace_data(self, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        """Replaces the function that gives the data of each new iterator by what `wrap` makes of it."""
        own_attributes.put(self._iterator, "_get_iterator", wrap(self._iterator._get_iterator))

    def continue_epochs(self, batches: int) -> None:
        """Makes the next epoch continue a new iterator over the data, of which `batches` are counted as taken."""
        self._iterator._current_iterator = iter(self._iterator._get_iterator())
        self._iterator._steps_seen = batches

    def begin_within_epoch(self, step: int, batches: int, begin: Callable[[], None]) -> None:
        """Makes the next epoch begin after so many of its steps.

        Args:
          step: the steps that were made.
          batches: the batches that were taken for them, and before with `steps_per_epoch`.
          begin: called when the epoch begins, before its data are asked for.
        """

        def rest_of_epoch() -> Iterator[tuple[int, int, Any]]:
            own_attributes.remove(self._iterator, "_enumerate_iterator")
            begin()
            yield from self._rest_of_epoch(step, batches)

        own_attributes.put(self._iterator, "_enumerate_iterator", rest_of_epoch)

    def _rest_of_epoch(self, step: int, batches: int) -> Iterator[tuple[int, int, Any]]:
        """Replaces Keras' `_enumerate_iterator` for one epoch, beginning at a step."""
        epochs = self._iterator
        epochs.data_adapter.on_epoch_begin()
        iterator = iter(epochs._get_iterator())
        length = self._length
        epochs._steps_seen = batches
        if length:
            epochs._current_iterator = iterator
        while not length or step < length:
            if length and epochs._num_batches and epochs._steps_seen >= epochs._num_batches:
                if epochs.steps_per_epoch:
                    epochs._interrupted_warning()
                break
            epochs._steps_seen += epochs.steps_per_execution
            yield step, step + epochs.steps_per_execution - 1, iterator
            step += epochs.steps_per_execution
        if epochs._num_batches and epochs._steps_seen >= epochs._num_batches:
            epochs._current_iterator = iter(epochs._get_iterator())
            epochs._steps_seen = 0
        epochs.data_adapter.on_epoch_end()


def first_epoch_of(model: keras.Model) -> int | None:
    """The epoch that the next `fit` of a model begins with, if it was set; a callback may set it for a running one."""
    return getattr(model, "_initial_epoch", None)


def begin_with_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets that epoch."""
    model._initial_epoch = epoch
