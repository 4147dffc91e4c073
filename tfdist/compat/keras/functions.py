# SPDX-License-Identifier: Apache-2.0
"""The functions that Keras calls for each execution of its loops, which it makes of a model's steps.

Keras makes them to call `strategy.run` within a `tf.function`. A strategy whose engine runs Python in each step gives a
function of its own instead. So no graph has to call Python, and exceptions are Python's own. There is no public way to
give one, so `make_train_function`, `make_test_function` and `make_predict_function` are replaced, once in a process. A
model that overrides them, and doesn't call the inherited ones, keeps what it makes.

And the calls of a train function are observed until its trial steps are over; then Keras makes it anew. The function
that Keras makes traces a step once. There is no public way to have a model trace its step again between two steps of
one `fit`. `fit` looks up `train_function` of the model for each call, so an observer takes the place of this attribute
of the instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import patching
from tfdist.compat.keras import calls


def ask_strategies(*kinds: str) -> None:
    """From now on Keras asks `function_of` of a model's strategy, if it has one, for its functions of these kinds.

    It is called with the model, "train", "test" or "predict", and the function that Keras has made. What it returns
    makes an execution: of an iterator, whose logs it returns, or for "predict" of a list of batches.
    """
    for kind in kinds:
        patching.once(calls.TRAINER, f"make_{kind}_function", _asking(kind))


def _asking(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    name = f"{kind}_function"

    # A program may have put a function of its own in the method's place, of any name and signature.
    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self, name)
            made = original(self, *args, **kwargs)
            function_of, function = getattr(self.distribute_strategy, "function_of", None), getattr(self, name)
            if function_of is not None and function is not None and function is not before:
                setattr(self, name, function_of(self, kind, function))
            return made

        return make

    return asking


def observe(model: keras.Model, is_over: Callable[[], bool], after_call: Callable[[float], None]) -> bool:
    """Observes the next calls of `model.train_function`; called while one of its calls traces a step.

    Args:
      model: a model that is in `fit`.
      is_over: returns True once the step is to be traced anew; this ends the observation.
      after_call: called after each call with its seconds. Not for the call that is under way.

    Returns:
      False if Keras can't make the function of this model anew, which is not observed then.
    """
    function = vars(model).get("train_function")
    if function is None or type(model).make_train_function is not keras.Model.make_train_function:
        return False
    if not isinstance(function, _Observed):
        patching.put(model, "train_function", _Observed(model, function, is_over, after_call))
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
