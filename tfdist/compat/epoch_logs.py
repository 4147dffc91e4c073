# SPDX-License-Identifier: Apache-2.0
"""Replaces how a running `fit` makes the logs of an epoch, when the epoch ends and before callbacks and validation.

There is no public way: `on_epoch_end` comes after validation, when `fit` has read the metrics. What is put on a model
stays until it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import calls, own_attributes

NEEDS = ("keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs(logs)",)

_NAME = "_get_metrics_result_or_logs"

Logs = Callable[[Any], Any]


def of(model: keras.Model) -> Logs:
    """The function that makes a model's logs of an epoch from those of its last step."""
    return getattr(model, _NAME)


def change_once(model: keras.Model, change: Callable[[Any, Logs], Any]) -> None:
    """Replaces the function of the logs until `fit` ends its next epoch.

    Args:
      model: the model.
      change: returns the logs of the epoch; called with those of the last step, and the function that was replaced.
    """
    beneath = of(model)

    def logs_of_epoch(logs: Any) -> Any:
        call = calls.current()
        if call is None or call.kind != "fit" or call.is_cut:
            return beneath(logs)
        remove(model, logs_of_epoch)
        return change(logs, beneath)

    put(model, logs_of_epoch)


def put(model: keras.Model, function: Logs) -> None:
    """Replaces the function that makes this model's logs of an epoch."""
    own_attributes.put(model, _NAME, function)


def remove(model: keras.Model, function: Logs | None = None) -> None:
    """Restores the function of the model's class, unless another one than `function` was put last."""
    found = own_attributes.of(model, _NAME)
    if found is not None and (function is None or found is function):
        own_attributes.remove(model, _NAME)
