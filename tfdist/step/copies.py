# SPDX-License-Identifier: Apache-2.0
"""The copies of a Keras variable on the devices of this process, and how all copies get one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.shares import Sum

# Above this a copy costs more than a ring of its own: 4 workers with 1M parameters made 12.2 steps/s packed, 9.6 not.
BUCKET_BYTES = 2**26


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
    for bucket in _buckets(variables):
        own = [_summable(copies_of(variable)[0]) for variable in bucket]
        sums = sum_over_workers(own if is_first else [tf.zeros_like(value) for value in own])
        # The first copy too: 0 + x may have another sign of zero than x.
        for variable, value in zip(bucket, sums, strict=True):
            assign_all(variable, value)


def sum_in_buckets(tensors: Sequence[tf.Tensor], sum_over_workers: Sum) -> list[tf.Tensor]:
    """Sums small tensors in one collective for all, and each large one in its own: to pack it would copy it."""
    is_small = [tensor.shape.num_elements() * tensor.dtype.size < BUCKET_BYTES for tensor in tensors]
    small = iter(sum_over_workers([t for t, fits in zip(tensors, is_small, strict=True) if fits]))
    return [
        next(small) if fits else sum_over_workers([tensor])[0] for tensor, fits in zip(tensors, is_small, strict=True)
    ]


def _summable(copy: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(copy)
    # Collectives add no unsigned integers and no booleans.
    return value if value.dtype.is_floating or value.dtype.is_complex else tf.cast(value, tf.int64)


def _buckets(variables: Sequence[Any]) -> list[list[Any]]:
    buckets, size = [[]], 0
    for variable in variables:
        num_bytes = tf.TensorShape(variable.shape).num_elements() * tf.as_dtype(variable.dtype).size
        if buckets[-1] and size + num_bytes > BUCKET_BYTES:
            buckets, size = [*buckets, []], 0
        buckets[-1].append(variable)
        size += num_bytes
    return [bucket for bucket in buckets if bucket]
