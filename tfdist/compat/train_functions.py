# SPDX-License-Identifier: Apache-2.0
"""Observes the calls of a model's train function until its trial steps are over, and then has Keras make it anew.

The function that Keras makes traces a step once. There is no public way to have a model trace its step again between
two steps of one `fit`, before callbacks see the first of them. `fit` looks up `train_function` of the model for each
call, so an observer takes the place of this attribute of the instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import own_attributes

NEEDS = ("keras.src.backend.tensorflow.trainer:TensorFlowTrainer.make_train_function",)


def observe(model: keras.Model, is_over: Callable[[], bool], after_call: Callable[[float], None]) -> bool:
    """Observes the next calls of `model.train_function`; called while one of its calls traces a step.

    Args:
      model: a model that is in `fit`.
      is_over: returns True once the step is to be traced anew; this ends the observation.
      after_call: called after each call with its seconds. Not for the call that goes on now.

    Returns:
      False if Keras can't make the function of this model anew, which is not observed then.
    """
    function = vars(model).get("train_function")
    if function is None or type(model).make_train_function is not keras.Model.make_train_function:
        return False
    if not isinstance(function, _Observed):
        own_attributes.put(model, "train_function", _Observed(model, function, is_over, after_call))
    return True


class _Observed:
    """Calls a train function."""

    def __init__(
        self, model: keras.Model, function: Any, is_over: Callable[[], bool], after_call: Callable[[float], None]
    ) -> None:
        self._model, self._function, self._is_over, self._after_call = model, function, is_over, after_call

    def __call__(self, iterator: Any) -> Any:
        if not self._is_over():
            began = time.perf_counter()
            logs = self._function(iterator)
            self._after_call(time.perf_counter() - began)
            return logs
        self._model.make_train_function(force=True)
        return self._model.train_function(iterator)
