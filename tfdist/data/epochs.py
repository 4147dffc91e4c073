# SPDX-License-Identifier: Apache-2.0
"""Where an epoch of Keras' `fit` begins, as seen from its steps: `fit` tells a strategy nothing of epochs."""

from __future__ import annotations

from typing import Any

import keras


def is_first_step(model: Any) -> bool:
    """Whether the step that `fit` asks for is the first one of an epoch: nothing was counted since it reset metrics.

    Call it outside of a graph. It reads variables, so ask only while it matters.
    """
    return not any(
        float(keras.ops.convert_to_numpy(variable))
        for metric in model.metrics
        for variable in metric.variables
        if "count" in variable.path
    )


def check_counts(model: Any) -> None:
    """Checks, after an update, that the model counts, so that `is_first_step` can tell.

    Raises:
      ValueError: it does not.
    """
    if not is_first_step(model):
        return
    raise ValueError(
        "Warmup(epochs=...) learns from a metric where an epoch begins, and this model's train_step updates none; use "
        f"Warmup(steps=...). Received: a model {model.name!r} whose metrics count nothing"
    )
