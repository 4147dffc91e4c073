# SPDX-License-Identifier: Apache-2.0
"""Tells losses that are sums over the examples from those that are means, and notices means of fewer numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models

# Losses that a line was written for; the step may be traced several times.
_noticed: weakref.WeakSet[Any] = weakref.WeakSet()


def is_sum(loss: Any) -> bool:
    """Returns True if a loss is a sum over the examples, and not a mean."""
    return getattr(loss, "reduction", "mean") in ("sum", "none", None)


def noticed(model: Any, num_replicas: int) -> list[tuple[Any, str, Any]]:
    """Returns patches by which a line is written for a loss that is the mean of fewer numbers than examples.

    The means of the replicas are weighted by their examples, which is not the mean of all those numbers.

    Args:
      model: the model.
      num_replicas: replicas that share a batch.
    """
    means = [loss for loss in models.compiled_losses(model) if hasattr(loss, "call") and not is_sum(loss)]
    return [(loss, "call", _noticing(loss)) for loss in means if num_replicas > 1 and loss not in _noticed]


def _noticing(loss: Any) -> Callable[..., Any]:
    call = loss.call

    def noticing(y_true: Any, y_pred: Any) -> Any:
        found = call(y_true, y_pred)
        if loss not in _noticed and _has_fewer(found, y_true, y_pred):
            _noticed.add(loss)
            _log.say(
                f"the loss {getattr(loss, 'name', None) or type(loss).__name__!r} leaves examples out, or has "
                "fewer numbers than examples: it is the mean of the replicas' means, and not that of one device; "
                "return 0 for those examples, or use sample_weight"
            )
        return found

    return noticing


def _has_fewer(found: Any, *given: Any) -> bool:
    """Returns True if a loss has fewer numbers than examples, as far as is known while it is traced."""
    if not isinstance(found, tf.Tensor):
        return False
    if found.shape.rank and found.shape[0] is not None:
        rows = {each.shape[0] for each in given if isinstance(each, tf.Tensor) and each.shape.rank}
        return bool(rows) and found.shape[0] not in rows
    return tf.is_symbolic_tensor(found) and _masks(found.op, {each.op for each in given if tf.is_symbolic_tensor(each)})


def _masks(operation: Any, sources: set[Any]) -> bool:
    """Returns True if an operation depends on the places where a mask is true, as those of `tf.boolean_mask`."""
    pending, seen = [operation], {*sources, operation}
    while pending:
        operation = pending.pop()
        if operation.type == "Where":
            return True
        inputs = {tensor.op for tensor in operation.inputs} - seen
        pending += inputs
        seen |= inputs
    return False
