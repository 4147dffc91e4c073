# SPDX-License-Identifier: Apache-2.0
"""Detection of the first step of an epoch: Keras' `fit` doesn't tell a strategy about epochs."""

from __future__ import annotations

from typing import Any

import keras


def is_first_step(model: Any) -> bool:
    """Returns True before the first step of an epoch: the metrics have counted nothing since `fit` reset them.

    Call it outside of a graph. It reads variables, so call it only if the result matters.
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
