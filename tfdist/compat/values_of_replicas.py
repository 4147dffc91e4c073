# SPDX-License-Identifier: Apache-2.0
"""Values of several replicas as one.

There is no public way within a traced function: `experimental_distribute_values_from_function` makes what it is given
into such values only where TensorFlow runs eagerly, with functions of a context that has no tensors of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values

NEEDS = (
    "tensorflow.python.distribute.distribute_utils:regroup",
    "tensorflow.python.distribute.values:PerReplicaSpec._value_specs",
)


def of(parts: Sequence[Any], always_wrap: bool = True) -> Any:
    """Returns a distributed value, or a structure of these, from the values of this process' replicas in order.

    Args:
      parts: a value, or a structure of values, for each replica.
      always_wrap: whether one object that all replicas have becomes a distributed value too.
    """
    return distribute_utils.regroup(tuple(parts), always_wrap=always_wrap)


def first_spec(specs: Any) -> Any:
    """Returns the structure of `tf.TypeSpec`s of the first replica's values, of which `specs` are the specs."""
    return tf.nest.map_structure(
        lambda spec: spec._value_specs[0] if isinstance(spec, values.PerReplicaSpec) else spec, specs
    )
