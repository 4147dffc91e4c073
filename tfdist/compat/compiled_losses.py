# SPDX-License-Identifier: Apache-2.0
"""The losses and functions that a Keras model was compiled with, metrics of losses, and losses that layers have left.

There is no public way: `model.loss` is what `compile` was given, in one of a dozen forms, and Keras resolves it into
an object that it keeps to itself; so it does with the metrics of the losses, and with a metric's function.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

NEEDS = (
    "keras.src.metrics.reduction_metrics:MeanMetricWrapper._fn",
    "keras.src.trainers.compile_utils:CompileLoss._flat_losses",
    "keras.src.trainers.compile_utils:CompileLoss.metrics",
    "keras.src.trainers.compile_utils:CompileMetrics._user_metrics",
    "keras.src.trainers.compile_utils:CompileMetrics._user_weighted_metrics",
    "keras.src.trainers.trainer:Trainer._compile_loss",
    "keras.src.trainers.trainer:Trainer._compile_metrics",
    "keras.src.trainers.trainer:Trainer._loss_tracker",
    "keras.src.layers.layer:Layer._clear_losses",
)


def losses(model: keras.Model) -> list[Any]:
    """The losses given to `compile`, one for each output that has one."""
    compiled = getattr(model, "_compile_loss", None)
    return [loss.loss for loss in getattr(compiled, "_flat_losses", None) or [] if loss.loss is not None]


def tracker_of(model: keras.Model) -> Any:
    """The metric of the whole loss."""
    return model._loss_tracker


def trackers_of_single(model: keras.Model) -> list[Any]:
    """The metrics of the single losses, in their order; none where there is only one."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def given_metrics(model: keras.Model) -> list[Any]:
    """The metric objects given to `compile`, also before Keras has built them into the model."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    return [metric for metric in tf.nest.flatten(given) if isinstance(metric, keras.metrics.Metric)]


def function_of(metric: Any) -> Any:
    """The function that a metric is the mean of; None if it wraps none."""
    return getattr(metric, "_fn", None)


def forget_added(model: keras.Model) -> None:
    """Forgets what layers have added to the loss: Keras knows it by ids, which later tensors may have."""
    model._clear_losses()
