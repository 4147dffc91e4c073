# SPDX-License-Identifier: Apache-2.0
"""Values of several replicas as one.

There is no public way within a traced function: `experimental_distribute_values_from_function` makes what it is given
into such values only where TensorFlow runs eagerly, with functions of a context that has no tensors of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.distribute import distribute_utils

NEEDS = ("tensorflow.python.distribute.distribute_utils:regroup",)


def of(values: Sequence[Any], always_wrap: bool = True) -> Any:
    """Returns a distributed value, or a structure of these, from the values of this process' replicas in order.

    Args:
      values: a value, or a structure of values, for each replica.
      always_wrap: whether one object that all replicas have becomes a distributed value too.
    """
    return distribute_utils.regroup(tuple(values), always_wrap=always_wrap)
