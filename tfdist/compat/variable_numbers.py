# SPDX-License-Identifier: Apache-2.0
"""Gives variables of several replicas `int()`, `float()`, `complex()` and `np.array()`, as other variables have them.

`int(optimizer.iterations)` raises a TypeError under stock strategies of several replicas, and `np.array` of a scalar
variable a ValueError. The class of such variables has no public name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow.python.distribute import values

NEEDS = ("tensorflow.python.distribute.values:DistributedVariable",)

_KINDS = {"__int__": int, "__float__": float, "__complex__": complex}


def define() -> None:
    """Adds the missing methods; they use the value of the variable outside of replicas."""
    for name, kind in _KINDS.items():
        if not hasattr(values.DistributedVariable, name):
            setattr(values.DistributedVariable, name, _reading(kind))
    if "__array__" not in vars(values.DistributedVariable):
        values.DistributedVariable.__array__ = _array


def _array(self: Any, dtype: Any = None, **options: Any) -> np.ndarray:
    # Called with `copy` by NumPy 2; what is read is a copy already.
    del options
    return np.asarray(self.read_value().numpy(), dtype)


def _reading(kind: type) -> Any:
    def read(self: Any) -> Any:
        return kind(self.read_value().numpy())

    return read
