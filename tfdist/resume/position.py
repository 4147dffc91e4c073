# SPDX-License-Identifier: Apache-2.0
"""Where `fit` is in its data, and how it is brought there again.

This is the one module of `resume` that reaches into Keras' loop, an instance of `EpochIterator` that `fit` keeps in a
local variable: it yields (first step, last step, iterator) for each call of the train function. `check` says whether
Keras still has what is used here.

`fit` makes one iterator over the data for each epoch and drops another one at its end; with `steps_per_epoch` it goes
on with one iterator over several epochs. What is saved is how many iterators were made and how many batches were taken
from the last one, so that data which are the same in every run come in the same order as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from tfdist.engines import fitting, progress, watch

_ATTRIBUTES = (
    "_current_iterator",
    "_distributed_dataset",
    "_num_batches",
    "_steps_seen",
    "data_adapter",
    "steps_per_epoch",
    "steps_per_execution",
)


def check() -> list[str]:
    """What Keras no longer has in the form in which it is used; empty if all is as known."""
    problems = [] if "epoch_iterator" in fitting.FIT.co_varnames else ["fit has no variable epoch_iterator"]
    made = TFEpochIterator(x=keras.ops.zeros((1, 1)), distribute_strategy=tf.distribute.get_strategy())
    problems += [f"TFEpochIterator.{name} is gone" for name in _ATTRIBUTES if not hasattr(made, name)]
    problems += [
        f"TFEpochIterator.{name} is gone"
        for name in ("_enumerate_iterator", "_get_iterator")
        if not hasattr(made, name)
    ]
    if not hasattr(keras.Model(), "_initial_epoch"):
        problems.append("Model._initial_epoch is gone")
    return problems


@dataclasses.dataclass(frozen=True)
class Place:
    """A place between two steps of `fit`.

    Attributes:
      epoch: the epoch, counted from 0.
      step: how many of its steps were made.
      num_iterators: how many iterators over the data were made.
      batches: how many batches were taken from the last one.
      num_batches: how many batches a pass over the data has, if that is known.
    """

    epoch: int
    step: int
    num_iterators: int
    batches: int
    num_batches: int | None


class DataPosition:
    """Follows one `fit` through its data.

    Args:
      model: the model whose `fit` is running, in a frame below this call.

    Raises:
      RuntimeError: no `fit` of it is running, or this version of Keras does it differently.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._epochs = _epoch_iterator(model)
        self._get_iterator = self._epochs._get_iterator
        # How many iterators `fit` has made; how many were made before it went on, that the data know nothing of.
        self._num_iterators = self._num_iterators_before = 0
        # What the data are to be taken from, once, in place of the whole.
        self._next: Any = None
        self._initial_epoch = getattr(model, "_initial_epoch", None)
        object.__setattr__(self._epochs, "_get_iterator", self._count)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._epochs._distributed_dataset.element_spec

    def of(self, epoch: int, step: int) -> Place:
        """The place after so many steps of an epoch."""
        epochs = self._epochs
        # With steps_per_epoch the same iterator is gone on with; else each epoch begins with a new one.
        is_between = not step and (epochs.steps_per_epoch is None or epochs._current_iterator is None)
        batches, passes = 0 if is_between else epochs._steps_seen, self._num_passes()
        if not is_between and not batches and not hasattr(epochs._distributed_dataset, "passes"):
            # The one that it is gone on with is there, and nothing was taken from it: `fit` will make it again.
            passes -= 1
        return Place(epoch, step, passes, batches, epochs._num_batches)

    def _num_passes(self) -> int:
        # Some make theirs only when the first batch is wanted, and count them.
        made = getattr(self._epochs._distributed_dataset, "passes", self._num_iterators)
        return self._num_iterators_before + made

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether the step that was made last is known to be the last one of its epoch."""
        epochs = self._epochs
        length = epochs.steps_per_epoch or epochs._num_batches
        return bool(length) and epochs._steps_seen >= length and epochs._steps_seen % length == 0

    def go_to(self, place: Place) -> None:
        """Has `fit`, which is about to begin, begin at this place.

        Raises:
          ValueError: the data have another length.
        """
        epochs = self._epochs
        self._check_length(place)
        epochs._num_batches = place.num_batches
        self._model._initial_epoch = place.epoch
        is_between = not place.batches
        before = place.num_iterators - (0 if is_between else 1) - self._num_passes()
        rest = self._rest(max(0, before), place.batches)
        self._num_iterators_before += place.num_iterators - self._num_passes()
        if is_between:
            return
        # The one to go on with is among them.
        self._num_iterators -= 1
        if place.step:
            object.__setattr__(epochs, "_enumerate_iterator", lambda: self._rest_of_epoch(place, rest))
        else:
            # With steps_per_epoch: a new epoch of an iterator that is gone on with.
            self._next = rest
            epochs._current_iterator = iter(epochs._get_iterator())
            epochs._steps_seen = place.batches

    def began(self) -> None:
        """`fit` has begun its first epoch: a later `fit` begins where it is told to."""
        self._model._initial_epoch = self._initial_epoch

    def _check_length(self, place: Place) -> None:
        known = self._epochs.data_adapter.num_batches
        if known and place.num_batches and known != place.num_batches:
            raise ValueError(
                f"Resume(directory): the checkpoint is of a fit over {place.num_batches} batches per pass; give the "
                f"same data and batch size, or another directory. Received: {known} batches"
            )

    def _rest(self, passes: int, batches: int) -> Any:
        restart = progress.restart_of(self._epochs._distributed_dataset)
        if restart is not None:
            return restart.after(passes, batches)
        if batches:
            watch.say(
                f"tfdist: a {type(self._epochs._distributed_dataset).__name__} of the user's own can't be begun in the "
                "middle; the rest of the epoch is made from its first batches"
            )
        return self._epochs._distributed_dataset

    def _count(self) -> Any:
        self._num_iterators += 1
        rest, self._next = self._next, None
        return self._get_iterator() if rest is None else rest

    def _rest_of_epoch(self, place: Place, rest: Any) -> Iterator[tuple[int, int, Any]]:
        """What Keras' `_enumerate_iterator` does, from a step on; for one epoch."""
        epochs = self._epochs
        object.__delattr__(epochs, "_enumerate_iterator")
        self._next = rest
        epochs.data_adapter.on_epoch_begin()
        iterator = iter(epochs._get_iterator())
        length = epochs.steps_per_epoch or epochs._num_batches
        epochs._steps_seen = place.batches
        if length:
            epochs._current_iterator = iterator
        step = place.step
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


def put_last(model: keras.Model, callback: keras.callbacks.Callback) -> None:
    """Has the running `fit` of this model call this callback after all others, from the next call on."""
    frame = fitting.frame_of(sys._getframe(1), model)
    callbacks = frame.f_locals.get("callbacks") if frame else None
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # A list of its own: Keras is going through the one that there is.
        callbacks.callbacks = [*(each for each in callbacks.callbacks if each is not callback), callback]


def is_fitting(frame: FrameType | None, model: keras.Model, callback: keras.callbacks.Callback) -> bool:
    """Whether a `fit` of this model with this callback is running in this frame, or below it."""
    found = fitting.frame_of(frame, model)
    callbacks = found.f_locals.get("callbacks") if found else None
    return any(each is callback for each in getattr(callbacks, "callbacks", callbacks or ()))


def _epoch_iterator(model: keras.Model) -> Any:
    frame = fitting.frame_of(sys._getframe(1), model)
    found = frame.f_locals.get("epoch_iterator") if frame else None
    if isinstance(found, TFEpochIterator):
        return found
    raise RuntimeError(
        f"Resume needs a running fit of the model whose loop it knows; its loop has changed with Keras "
        f"{keras.__version__}, or on_train_begin was called by something else. Received: {model.name!r}"
    )
