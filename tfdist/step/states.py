# SPDX-License-Identifier: Apache-2.0
"""Computes the values that an update assigns to non-trainable variables from the values on the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.step.contribution import Contribution, times


@dataclasses.dataclass
class State:
    """Non-trainable variable, with the reduction of its values over replicas."""

    variable: Any
    # Reduction over replicas: "mean", "sum", "maximum" or "minimum".
    mode: str
    # Number of calls of `apply` before the write.
    position: int


def summable(value: tf.Tensor, weight: Any) -> tf.Tensor:
    """Returns a value that can be summed over replicas."""
    return times(value, weight) if value.dtype.is_floating else tf.cast(value, tf.int64)


def change(value: tf.Tensor, before: tf.Tensor | None) -> tf.Tensor:
    """Returns the new value of a state, or its difference from `before`."""
    if before is None:
        return value
    return value - before if value.dtype.is_floating else tf.cast(value, tf.int64) - tf.cast(before, tf.int64)


def moved(variable: Any, change: tf.Tensor, total: Contribution) -> tf.Tensor:
    """Returns the new value of a state, from differences of replicas that began with different values."""
    now = tf.convert_to_tensor(variable)
    if change.dtype.is_floating:
        return now + tf.cast(tf.math.divide_no_nan(change, tf.cast(total.weight, change.dtype)), now.dtype)
    return tf.cast(tf.cast(now, tf.int64) + change // tf.cast(total.replicas, tf.int64), now.dtype)


def mean(variable: Any, value: tf.Tensor, total: Contribution) -> tf.Tensor:
    """Returns the mean of a state over the replicas' examples."""
    dtype = tf.as_dtype(variable.dtype)
    if value.dtype.is_floating:
        average = tf.math.divide_no_nan(value, tf.cast(total.weight, value.dtype))
        # Contributions without examples leave the value unchanged.
        return tf.cast(tf.where(total.weight > 0, average, tf.cast(tf.convert_to_tensor(variable), value.dtype)), dtype)
    # Seeds and counts: all replicas of a step begin with the same value, and end with the same value.
    return tf.cast(value // tf.cast(total.replicas, value.dtype), dtype)
