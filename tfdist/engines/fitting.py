# SPDX-License-Identifier: Apache-2.0
"""Finds the Keras loop that is running: `fit` tells neither strategies nor data sets that it calls them.

This is the one module that knows the loops by the code of their frames.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

FIT = inspect.unwrap(TensorFlowTrainer.fit).__code__
_OTHERS = {
    inspect.unwrap(function).__code__
    for function in (TensorFlowTrainer.evaluate, TensorFlowTrainer.predict, TensorFlowTrainer._maybe_symbolic_build)
}
_CALLS = {
    inspect.unwrap(getattr(TensorFlowTrainer, name)).__code__
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
}
_BUILD = inspect.unwrap(TensorFlowTrainer._maybe_symbolic_build).__code__


def call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the innermost call of a model's loop, such as `fit`, that is `frame` or below it; or None."""
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    return frame


def is_build(frame: FrameType) -> bool:
    """Whether this is the frame in which Keras builds a model, as each call but `predict` does before anything else."""
    return frame.f_code is _BUILD


def step_to_build(frame: FrameType) -> str:
    """The method that the call for which Keras builds a model hands to `run`, by the frame that `is_build`."""
    caller = frame.f_back.f_code.co_name if frame.f_back is not None else ""
    return "test_step" if caller in ("evaluate", "test_on_batch") else "train_step"


def fit_frame() -> FrameType | None:
    """The frame of the `fit` that iterates here, or None if somebody else does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _OTHERS:
        if frame.f_code is FIT:
            return frame
        frame = frame.f_back
    return None


def frame_of(frame: FrameType | None, model: keras.Model) -> FrameType | None:
    """The frame of a running `fit` of this model, also while it validates, that is `frame` or below it; or None."""
    while frame is not None and not (frame.f_code is FIT and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return frame
