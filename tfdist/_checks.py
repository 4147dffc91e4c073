# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass in. A bool is no number here, though Python takes it for one. No TensorFlow import.

The caller raises, apart from `check_count`. A message names the argument, what it must be, and the value received.
"""

from __future__ import annotations

import math
from typing import TypeGuard


def is_count(value: object, *, at_least: int = 1) -> TypeGuard[int]:
    """Returns True for an int of at least `at_least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def check_count(owner: str, name: str, value: object, *, at_least: int = 1) -> None:
    """Raises ValueError unless an argument of `owner`, a class or a function, is an int of at least `at_least`."""
    if not is_count(value, at_least=at_least):
        raise ValueError(f"{owner}({name}=...) must be an integer of at least {at_least}. Received: {name}={value!r}")


def is_int(value: object) -> TypeGuard[int]:
    """Returns True for an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object, *, is_finite: bool = True) -> TypeGuard[float]:
    """Returns True for an int or float that is finite, or with `is_finite=False` for one that is not NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) if is_finite else not math.isnan(value)
