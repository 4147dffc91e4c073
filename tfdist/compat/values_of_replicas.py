# SPDX-License-Identifier: Apache-2.0
"""Values of several replicas as one.

There is no public way within a traced function: `experimental_distribute_values_from_function` makes what it is given
into such values only where TensorFlow runs eagerly, with functions of a context that has no tensors of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.distribute import distribute_utils


def of(values: Sequence[Any]) -> Any:
    """One distributed value, of what the first, second, ... replica of this process has."""
    return distribute_utils.regroup(tuple(values), always_wrap=True)
