# SPDX-License-Identifier: Apache-2.0
"""Adds callbacks to each `fit`, of any model: those that a launcher asks for.

There is no public way to the fits of a program. `fit` is replaced once in a process; the user's callbacks come first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfdist.compat import replacing

NEEDS = ("keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit",)

# Given a model and the callbacks of a `fit`, returns those to add.
Added = Callable[[Any, Sequence[Any]], Sequence[Any]]
_added: list[Added] = []


def add_to_fit(added: Added) -> None:
    """From now on each `fit` of this process has these callbacks, too; a second call replaces the first."""
    _added[:] = [added]
    replacing.once(TensorFlowTrainer, "fit", _with_callbacks)


def _with_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("callbacks")
        # A `CallbackList` of the user's own is complete.
        if not isinstance(given, keras.callbacks.CallbackList):
            own = given if isinstance(given, list | tuple) else [given] if given else []
            bound.arguments["callbacks"] = [*own, *_added[0](bound.arguments["self"], own)]
        return original(*bound.args, **bound.kwargs)

    return fit
