# SPDX-License-Identifier: Apache-2.0
"""Takes over the first call of `fit` of an unmodified script, and reads the batches that it would train on.

Keras has no hook for all models of a process, so `keras.Model.fit` is replaced within a block, and put back after it.
The class that turns what `fit` takes (arrays, data sets, generators) into batches is not public; asking it gives the
profiler the batches of this very call, whatever they come from.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

NEEDS = ("keras.src.trainers.epoch_iterator:EpochIterator.data_adapter",)
_DATA = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")


@contextlib.contextmanager
def taken_over(instead: Callable[..., Any]) -> Iterator[None]:
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


def batches(arguments: dict[str, Any]) -> tf.data.Dataset:
    """Returns the batches that `fit` with these arguments reads in an epoch, (x, y, sample_weight) or a part of it."""
    given = {name: arguments[name] for name in _DATA if arguments.get(name) is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fit has given them already
        return EpochIterator(**given).data_adapter.get_tf_dataset()
