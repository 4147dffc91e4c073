# SPDX-License-Identifier: Apache-2.0
"""A running `fit`: its epochs and their logs, its tracebacks, and the batches that it reads."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import traceback_utils

from tfdist.compat import patching
from tfdist.compat.keras import calls

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._current_iterator, _enumerate_iterator",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._get_iterator, _num_batches, _steps_seen, data_adapter",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.steps_per_epoch, steps_per_execution, _interrupted_warning",
    "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs(logs)",
    "keras.src.utils.traceback_utils:_EXCLUDED_PATHS",
)


def show_missing(call: calls.Call | None, missing: int) -> None:
    """Makes the progress bar end this epoch of a call that many batches before its target; Keras shows all as done."""
    for logger in () if call is None else call.each_callback:
        if isinstance(logger, keras.callbacks.ProgbarLogger) and logger.target:
            patching.put_method(logger, "on_epoch_end", _ending_short, missing)


def _ending_short(logger: Any, missing: int, epoch: int, logs: Any = None) -> None:
    patching.remove(logger, "on_epoch_end")
    target, logger.target = logger.target, max(0, logger.target - missing)
    try:
        logger.on_epoch_end(epoch, logs)
    finally:
        logger.target = target


def data_of(iterator: Any) -> Any:
    """The distributed data set that an epoch iterator of Keras iterates over."""
    return type(iterator)._get_iterator(iterator)


class EpochIterator:
    """The epoch iterator of one `fit`, which keeps it alive.

    Args:
      iterator: Keras' own.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator_of: Callable[[], Any] = weakref.ref(iterator)

    @property
    def _iterator(self) -> Any:
        return self._iterator_of()

    @classmethod
    def of(cls, model: keras.Model) -> EpochIterator | None:
        """Returns the epoch iterator of an open `fit` of this model in this thread; None if there is none."""
        return cls._of_call(calls.fit_of(model))

    @classmethod
    def of_steps(cls, call: calls.Call | None) -> EpochIterator | None:
        """Returns that of a call if its number of steps was given, which the data don't tell then; else None."""
        found = cls._of_call(call)
        return None if found is None or found._iterator.steps_per_epoch is None else found

    @classmethod
    def _of_call(cls, call: calls.Call | None) -> EpochIterator | None:
        epochs = None if call is None else call.epochs
        epochs = epochs() if isinstance(epochs, weakref.ref) else epochs
        return None if epochs is None else cls(epochs)

    @property
    def dataset(self) -> Any:
        """The distributed data set that it iterates over."""
        return data_of(self._iterator)

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
        length, taken = _length(self._iterator), self._iterator._steps_seen
        return bool(length) and taken >= length and taken % length == 0

    def replace_data(self, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        """Replaces the function that gives the data of each new iterator by what `wrap` makes of it."""
        patching.put(self._iterator, "_get_iterator", wrap(self._iterator._get_iterator))

    def continue_epochs(self, batches: int) -> None:
        """Makes the next epoch continue a new iterator over the data, of which `batches` are counted as taken."""
        self._iterator._current_iterator = iter(self._iterator._get_iterator())
        self._iterator._steps_seen = batches

    def begin_within_epoch(self, step: int, batches: int, begin: Callable[[], None]) -> None:
        """Makes the next epoch begin after so many of its steps.

        Args:
          step: the steps that were made.
          batches: the batches that were taken for them, and before with `steps_per_epoch`.
          begin: called when the epoch begins, before its data are read.
        """
        before = patching.get(self._iterator, "_enumerate_iterator")
        patching.put_method(self._iterator, "_enumerate_iterator", _rest_of_epoch, step, batches, begin, before)


def take_any_length(epochs: Any) -> None:
    """Makes each pass of Keras' epoch iterator end with its data: one may have more batches than the first."""
    patching.put_method(epochs, "_enumerate_iterator", _without_length)


def _without_length(epochs: Any) -> Iterator[tuple[int, int, Any]]:
    epochs._num_batches = None
    return type(epochs)._enumerate_iterator(epochs)


def _length(epochs: Any) -> int | None:
    """The number of steps of an epoch, if it is known."""
    return epochs.steps_per_epoch or epochs._num_batches


def _rest_of_epoch(epochs: Any, step: int, batches: int, begin: Callable[[], None], before: Any) -> Iterator[Any]:
    """Replaces Keras' `_enumerate_iterator` for one epoch, beginning at a step; see `begin_within_epoch`."""
    patching.remove(epochs, "_enumerate_iterator")
    if before is not None:
        patching.put(epochs, "_enumerate_iterator", before)
        epochs._num_batches = None
    begin()
    epochs.data_adapter.on_epoch_begin()
    iterator = iter(epochs._get_iterator())
    length = _length(epochs)
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


# Replaces how a running `fit` makes the logs of an epoch, when the epoch ends and before callbacks and validation.
#
# There is no public way: `on_epoch_end` comes after validation, when `fit` has read the metrics. What is put on a model
# stays until it is removed.


_NAME = "_get_metrics_result_or_logs"

Logs = Callable[[Any], Any]


def change_logs_once(model: keras.Model, change: Callable[[keras.Model, Any, Logs], Any]) -> Callable[[], None]:
    """Replaces the function of the logs until `fit` ends its next epoch.

    Args:
      model: the model.
      change: returns the logs of the epoch; called with the model, the logs of the last step, and the function that was
        replaced.

    Returns:
      A function that ends this sooner. It does not keep the model alive.
    """
    beneath, model_of = getattr(model, _NAME), weakref.ref(model)

    def logs_of_epoch(logs: Any) -> Any:
        call = calls.current()
        if call is None or call.kind != "fit":
            return beneath(logs)
        end()
        return change(model, logs, beneath)

    def end() -> None:
        found, hook = model_of(), hook_of()
        # Another function may have been put in its place since.
        if found is not None and hook is not None and patching.get(found, _NAME) is hook:
            patching.remove(found, _NAME)

    hook_of = weakref.ref(logs_of_epoch)
    patching.put(model, _NAME, logs_of_epoch)
    return end


# Keeps tfdist's frames out of the tracebacks that Keras shortens.
#
# So an error of a layer shows the user's line and the layer's, as on one device;
# `keras.config.disable_traceback_filtering()` shows all frames. Keras takes no further paths to leave out, so its tuple
# of paths gets one more.


_OWN_PATH = str(pathlib.Path(__file__).resolve().parents[2]) + os.sep


def shorten_tracebacks() -> None:
    """From now on the tracebacks that Keras shortens have no frames of tfdist."""
    if _OWN_PATH not in traceback_utils._EXCLUDED_PATHS:
        traceback_utils._EXCLUDED_PATHS += (_OWN_PATH,)


# Takes over the first call of `fit` of an unmodified script, and reads the batches that it would train on.
#
# Keras has no hook for all models of a process, so `keras.Model.fit` is replaced within a block, and put back after it.
# The class that turns the data of `fit` (arrays, data sets, generators) into batches is not public. It gives the
# profiler the batches of this very call, whatever they come from.


_DATA = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")


@contextlib.contextmanager
def take_over_fit(instead: Callable[..., Any]) -> Iterator[None]:
    """Within the block calls `instead(model, fit, arguments)` for the first call of `fit` in this process.

    `fit(**arguments)` is the bound original; calls within the first, and after it, reach the original.
    """
    original, was_called = keras.Model.fit, False

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        if was_called:
            return original(self, *args, **kwargs)
        arguments = dict(inspect.signature(original).bind(self, *args, **kwargs).arguments)
        was_called = True
        del arguments["self"]
        return instead(self, lambda **given: original(self, **given), arguments)

    keras.Model.fit = fit
    try:
        yield
    finally:
        # The class inherits `fit`.
        del keras.Model.fit


def batches_of_fit(arguments: dict[str, Any]) -> tf.data.Dataset:
    """Returns the batches that `fit` with these arguments reads in an epoch, (x, y, sample_weight) or a part of it."""
    given = {name: arguments[name] for name in _DATA if arguments.get(name) is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fit has given them already
        return calls.EPOCHS(**given).data_adapter.get_tf_dataset()
