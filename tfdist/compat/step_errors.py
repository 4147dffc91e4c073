# SPDX-License-Identifier: Apache-2.0
"""Makes `fit` raise the Python exception of a step, and call its callbacks for an execution that the data's end cut.

It also keeps tfdist's frames out of the tracebacks that Keras shortens, so that an error of a layer shows the user's
line and the layer's, as on one device; `keras.config.disable_traceback_filtering()` shows all frames. Keras takes no
further paths to leave out, so its tuple of paths gets one more.

An operation that calls Python passes on a few kinds of exceptions; a ConnectionError becomes a
`tf.errors.UnknownError`, which no program that handles lost connections catches. There is no public way out of the step
for it. And where the length of the data is not known, a step itself says that they are at their end: where several
steps make an execution, Keras would call no callback for those that were made. TensorFlow's errors of collectives whose
other workers have ended take many lines, of which none says what to do.

Keras enters `catch_stop_iteration` of its epoch iterator around the steps of an epoch, so this method is replaced, once
in a process; nothing changes for data sets without the method `raised_in_step`, nor for iterators without the attribute
`given_in_execution`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.utils import traceback_utils

from tfdist.compat import calls, replacing

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._distribute_strategy",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._distributed_dataset",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator.catch_stop_iteration",
    "keras.src.utils.traceback_utils:_EXCLUDED_PATHS",
)
_OWN_PATH = str(pathlib.Path(__file__).resolve().parent.parent) + os.sep


def shorten_tracebacks() -> None:
    """From now on the tracebacks that Keras shortens have no frames of tfdist."""
    if _OWN_PATH not in traceback_utils._EXCLUDED_PATHS:
        traceback_utils._EXCLUDED_PATHS += (_OWN_PATH,)


def install() -> None:
    """From now on Keras' loops raise what `raised_in_step` of their distributed data set returns, if that is not None.

    Else they raise what the agreement of several workers knows of the error, if it knows something.
    """
    replacing.once(TFEpochIterator, "catch_stop_iteration", _keeping_types)


def _keeping_types(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def catch_stop_iteration(self: Any) -> Iterator[None]:
        with original(self):
            try:
                yield
            except tf.errors.OutOfRangeError:
                fit = calls.iterating_fit()
                if fit is not None:
                    fit.end_cut_execution()
                raise
            except tf.errors.OpError as error:
                raised = getattr(self._distributed_dataset, "raised_in_step", lambda error: None)(error)
                raised = raised or _of_other_workers(self._distribute_strategy, error)
                if raised is None:
                    raise
                raise raised from None

    return catch_stop_iteration


def _of_other_workers(strategy: Any, error: tf.errors.OpError) -> Exception | None:
    distribution = getattr(strategy, "distribution", None)
    agreement = distribution and distribution.agreement
    return agreement.failure_behind(error) if agreement else None
