# SPDX-License-Identifier: Apache-2.0
"""Tells losses that are sums over the examples from those that are means."""

from __future__ import annotations

from typing import Any


def is_sum(loss: Any) -> bool:
    """Returns True if a loss is a sum over the examples, and not a mean."""
    return getattr(loss, "reduction", "mean") in ("sum", "none", None)
