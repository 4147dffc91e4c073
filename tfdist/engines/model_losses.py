# SPDX-License-Identifier: Apache-2.0
"""The losses that a model was compiled with, and which of them are sums over the examples."""

from __future__ import annotations

from typing import Any

import keras


def losses(model: keras.Model) -> list[Any]:
    """The losses given to `compile`, one for each output that has one."""
    compiled = getattr(model, "_compile_loss", None)
    return [loss.loss for loss in getattr(compiled, "_flat_losses", None) or [] if loss.loss is not None]


def is_sum(loss: Any) -> bool:
    """Whether a loss is a sum over the examples rather than a mean."""
    return getattr(loss, "reduction", "mean") in ("sum", "none", None)
