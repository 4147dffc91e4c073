# SPDX-License-Identifier: Apache-2.0
"""The copies of a Keras variable on the devices of this process, and how all copies get one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.passes.shares import Sum
from tfdist.transport import buckets


def copies_of(variable: Any) -> list[Any]:
    """A Keras variable's copies in this process; only one if it was made outside of the strategy's scope."""
    return list(getattr(variable.value, "values", [variable.value]))


def is_mirrored(variable: Any) -> bool:
    """Returns True if a Keras variable has a copy for each replica."""
    return hasattr(variable.value, "values")


def is_counter(variable: Any) -> bool:
    """Returns True if the value of a Keras variable is the sum of its copies, as for the counts of metrics."""
    return variable.aggregation == "sum"


def counts(metric: Any) -> bool:
    """Returns True if all variables of the metric are sums over the replicas."""
    return bool(metric.variables) and all(is_mirrored(v) and is_counter(v) for v in metric.variables)


def own_sum(variable: Any) -> tf.Tensor:
    """The sum over the copies in this process; int64 of integers."""
    values = [_summable(copy) for copy in copies_of(variable)]
    return values[0] if len(values) == 1 else tf.add_n(values)


def assign_all(variable: Any, value: tf.Tensor) -> None:
    """Gives all copies in this process one value."""
    for copy in copies_of(variable):
        with tf.device(copy.device):
            copy.assign(tf.cast(value, copy.dtype))


def broadcast(variables: Sequence[Any], is_first: bool, sum_over_workers: Sum) -> None:
    """Gives all copies in all workers the value of the first copy in the first one.

    Args:
      variables: Keras variables.
      is_first: whether this worker is the first one.
      sum_over_workers: sums tensors over all workers.
    """
    sizes = [tf.TensorShape(each.shape).num_elements() * tf.as_dtype(each.dtype).size for each in variables]
    for bucket in buckets.grouped(variables, sizes):
        own = [_summable(copies_of(variable)[0]) for variable in bucket]
        sums = sum_over_workers(own if is_first else [tf.zeros_like(value) for value in own])
        # The first copy too: 0 + x may have another sign of zero than x.
        for variable, value in zip(bucket, sums, strict=True):
            assign_all(variable, value)


def _summable(copy: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(copy)
    # Collectives add no unsigned integers and no booleans.
    return value if value.dtype.is_floating or value.dtype.is_complex else tf.cast(value, tf.int64)
