# SPDX-License-Identifier: Apache-2.0
"""Position of `fit` in its data: saved in a checkpoint, and restored.

`fit` makes one iterator over the data for each epoch, and one more at the epoch's end that it discards. With
`steps_per_epoch` it continues one iterator over several epochs. A checkpoint has the number of iterators made, and the
number of batches taken from the last one. So deterministic data have the same order as in an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import calls, epoch_iterators
from tfdist.data import progress
from tfdist.runtime import messages


@dataclasses.dataclass(frozen=True)
class Place:
    """A position between two steps of `fit`.

    Attributes:
      epoch: the epoch, counted from 0.
      step: number of steps made in this epoch.
      num_iterators: number of iterators made over the data.
      batches: number of batches taken from the last iterator.
      num_batches: number of batches in a pass over the data; None if unknown.
    """

    epoch: int
    step: int
    num_iterators: int
    batches: int
    num_batches: int | None


class DataPosition:
    """Tracks the position of one running `fit` in its data.

    Args:
      model: the model whose `fit` is running in this thread.

    Raises:
      RuntimeError: no `fit` of the model is running, or the loop of this version of Keras is not supported.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._epochs = _epoch_iterator(model)
        # Number of iterators that `fit` has made, and number of those made before the interruption.
        self._num_iterators = self._num_iterators_before = 0
        # Data set of the next iterator, once, in place of the whole data set.
        self._next: Any = None
        self._first_epoch = epoch_iterators.first_epoch_of(model)
        self._epochs.replace_data(self._counting)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._epochs.dataset.element_spec

    def of(self, epoch: int, step: int) -> Place:
        """Returns the position after so many steps of an epoch."""
        epochs = self._epochs
        # With steps_per_epoch `fit` continues the same iterator; else each epoch begins with a new one.
        is_between = not step and not epochs.goes_on
        batches, passes = 0 if is_between else epochs.batches_taken, self._num_passes()
        if not is_between and not batches and not hasattr(epochs.dataset, "passes"):
            # The iterator to continue exists, but no batch was taken from it: `fit` will make it again.
            passes -= 1
        return Place(epoch, step, passes, batches, epochs.num_batches)

    def _num_passes(self) -> int:
        # Some data sets make their iterator at the first batch, and count the passes themselves.
        made = getattr(self._epochs.dataset, "passes", self._num_iterators)
        return self._num_iterators_before + made

    @property
    def is_at_end_of_epoch(self) -> bool:
        """True if the last step is known to be the last one of its epoch."""
        return self._epochs.is_at_end_of_epoch

    def go_to(self, place: Place) -> None:
        """Makes `fit`, which is about to begin, begin at this position.

        Raises:
          ValueError: the data have another length than in the checkpoint.
        """
        self._check_length(place)
        self._epochs.num_batches = place.num_batches
        epoch_iterators.begin_with_epoch(self._model, place.epoch)
        is_between = not place.batches
        before = place.num_iterators - (0 if is_between else 1) - self._num_passes()
        rest = self._rest(max(0, before), place.batches)
        self._num_iterators_before += place.num_iterators - self._num_passes()
        if is_between:
            return
        # The iterator to continue is among these.
        self._num_iterators -= 1
        if place.step:
            self._epochs.begin_within_epoch(place.step, place.batches, lambda: self._take_next_from(rest))
        else:
            # With steps_per_epoch: a new epoch continues an iterator.
            self._take_next_from(rest)
            self._epochs.continue_epochs(place.batches)

    def began(self) -> None:
        """Restores the model's initial epoch for a later `fit`, once this one has begun its first epoch."""
        epoch_iterators.begin_with_epoch(self._model, self._first_epoch)

    def _check_length(self, place: Place) -> None:
        known = self._epochs.num_batches_given
        if known and place.num_batches and known != place.num_batches:
            raise ValueError(
                f"Resume(directory): the checkpoint is of a fit over {place.num_batches} batches per pass; give the "
                f"same data and batch size, or another directory. Received: {known} batches"
            )

    def _rest(self, passes: int, batches: int) -> Any:
        restart = progress.restart_of(self._epochs.dataset)
        if restart is not None:
            return restart.after(passes, batches)
        if batches:
            messages.say(
                f"tfdist: a {type(self._epochs.dataset).__name__} of the user's own can't be begun in the "
                "middle; the rest of the epoch is made from its first batches"
            )
        return self._epochs.dataset

    def _take_next_from(self, rest: Any) -> None:
        self._next = rest

    def _counting(self, data: Callable[[], Any]) -> Callable[[], Any]:
        def data_of_next() -> Any:
            self._num_iterators += 1
            rest, self._next = self._next, None
            return data() if rest is None else rest

        return data_of_next


def put_last(model: keras.Model, callback: keras.callbacks.Callback) -> None:
    """Moves the callback to the end of the running `fit`'s callbacks, from the next call on."""
    fit = calls.fit_of(model)
    callbacks = None if fit is None else fit.callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # A new list, because Keras is iterating over the present one.
        callbacks.callbacks = [*(each for each in callbacks.callbacks if each is not callback), callback]


def is_fitting(model: keras.Model, callback: keras.callbacks.Callback) -> bool:
    """Returns True if this thread is in a `fit` of this model with this callback."""
    fit = calls.fit_of(model)
    callbacks = None if fit is None else fit.callbacks
    return any(each is callback for each in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks)))


def _epoch_iterator(model: keras.Model) -> epoch_iterators.EpochIterator:
    found = epoch_iterators.EpochIterator.of(model)
    if found is not None:
        return found
    raise RuntimeError(
        f"Resume needs a running fit of the model whose loop it knows; its loop has changed with Keras "
        f"{keras.__version__}, or on_train_begin was called by something else. Received: {model.name!r}"
    )
