# SPDX-License-Identifier: Apache-2.0
"""Finds the Keras loop that is running, by the frames of its callers.

There is no public way: `fit` tells neither strategies nor data sets that it calls them, nor for which model. Keras
hands over bound methods and data, and what it does with them is known by the code of its frames alone. Frames are only
read here, so there is nothing to restore.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._get_metrics_result_or_logs",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._make_function(self, step_function, function)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.evaluate(self)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit(self, callbacks, end_step, iterator, logs)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict(self)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.predict_on_batch(self)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.test_on_batch(self)",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.train_on_batch(self)",
)

FIT = inspect.unwrap(TensorFlowTrainer.fit).__code__
_OTHERS = {inspect.unwrap(function).__code__ for function in (TensorFlowTrainer.evaluate, TensorFlowTrainer.predict)}
_CALLS = {
    inspect.unwrap(getattr(TensorFlowTrainer, name)).__code__
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
}
# What Keras makes of a step: it takes the batches of an execution from an iterator, with `zip`.
_EXECUTION = next(
    constant
    for constant in TensorFlowTrainer._make_function.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "function"
)


class Fit(NamedTuple):
    """A call of `fit` that is running.

    Attributes:
      model: the model.
      callbacks: Keras' list of its callbacks.
    """

    model: Any
    callbacks: Any


def call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the innermost call of a model's loop, such as `fit`, that is `frame` or below it; or None."""
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    return frame


def call_name() -> str | None:
    """The name of the innermost call of a model's loop that runs here, such as "fit"; or None."""
    frame = call_frame(sys._getframe(1))
    return None if frame is None else frame.f_code.co_name


def name_of_call(frame: FrameType | None) -> str:
    """The name of the innermost call that is `frame` or below it, as users write it: "model.fit"; "" for none."""
    found = call_frame(frame)
    return "" if found is None else f"model.{found.f_code.co_name}"


def predicting_model() -> Any:
    """The model whose `predict` or `predict_on_batch` runs here, within no other loop; or None.

    Keras hands to `run` a function of its own, which says nothing of the model.
    """
    frame = call_frame(sys._getframe(1))
    is_prediction = frame is not None and frame.f_code.co_name in ("predict", "predict_on_batch")
    return frame.f_locals.get("self") if is_prediction else None


def calling_object() -> Any:
    """The `self` of the method that calls the method that calls this; None if a function calls it."""
    return sys._getframe(2).f_locals.get("self")


def fit_frame() -> FrameType | None:
    """The frame of the `fit` that iterates here, or None if another loop does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _OTHERS:
        if frame.f_code is FIT:
            return frame
        frame = frame.f_back
    return None


def iterating_fit() -> Fit | None:
    """The `fit` that iterates here, or None if somebody else does, such as the validation within it."""
    frame = fit_frame()
    return None if frame is None else Fit(frame.f_locals["self"], frame.f_locals["callbacks"])


def steps_of_execution() -> int:
    """The `steps_per_execution` of the `fit` whose train function takes a batch here; 1 for any other taker.

    A train function of the user's own may take its batches in another way, and a step that runs eagerly sees one batch.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _EXECUTION:
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code is not FIT:
        return 1
    model = frame.f_back.f_locals["self"]
    return 1 if model.run_eagerly else int(model.steps_per_execution)


def end_cut_execution() -> None:
    """Calls the callbacks for the end of an execution in which a step found no data, if steps before it were made.

    Keras calls them only after an execution that raised nothing. On one device the last one is such, however few of its
    `steps_per_execution` there were data for.
    """
    frame = fit_frame()
    if frame is None:
        return
    model, iterator = frame.f_locals["self"], frame.f_locals.get("iterator")
    # The last of the handles is that of the step that found no data.
    if model.steps_per_execution > 1 and getattr(iterator, "given_in_execution", 0) > 1:
        logs = model._get_metrics_result_or_logs(frame.f_locals["logs"])
        frame.f_locals["callbacks"].on_train_batch_end(frame.f_locals["end_step"], logs)


def is_called_by_fit() -> bool:
    """Returns True if the caller was called by `fit` itself."""
    return sys._getframe(2).f_code is FIT


def frame_of(frame: FrameType | None, model: keras.Model) -> FrameType | None:
    """The frame of a running `fit` of this model, also while it validates, that is `frame` or below it; or None."""
    while frame is not None and not (frame.f_code is FIT and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return frame


def callbacks_of(model: keras.Model, frame: FrameType | None = None) -> Any:
    """Keras' list of the callbacks of a running `fit` of this model, that is `frame` or below it; or None.

    Args:
      model: the model.
      frame: a frame of any thread; by default the caller's.
    """
    found = frame_of(sys._getframe(1) if frame is None else frame, model)
    return None if found is None else found.f_locals.get("callbacks")
