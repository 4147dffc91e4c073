# SPDX-License-Identifier: Apache-2.0
"""Broadcasts the initial values of variables whose dtype TensorFlow's broadcast refuses, such as bfloat16 and int8.

Under MultiWorkerMirroredStrategy the chief sends every worker the value that a variable begins with, by a collective
that takes six dtypes (TensorFlow 2.21). There is no public way: the strategy makes a variable and broadcasts its value
in one call. Such a value is cast to a wider dtype, which loses nothing, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

NEEDS = (
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._get_variable_creator_initial_value",
)

_TAKEN = frozenset({tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


def take_all_dtypes(strategy: tf.distribute.Strategy) -> None:
    """Allows variables of all numeric dtypes under a strategy of several workers."""
    extended: Any = strategy.extended
    original = extended._get_variable_creator_initial_value

    def creator_initial_value(
        replica_id: int, device: Any, primary_var: Any, **options: Any
    ) -> Callable[[], tf.Tensor] | tf.Tensor:
        if replica_id != 0:
            # Copies the first replica's value.
            return original(replica_id, device, primary_var, **options)

        def initial_value() -> tf.Tensor:
            with tf.device(device):
                value = _value(options["initial_value"], options.get("dtype"))
            carrier = _carrier(value.dtype)
            carried = {**options, "initial_value": tf.cast(value, carrier), "dtype": carrier}
            return tf.cast(original(replica_id, device, primary_var, **carried)(), value.dtype)

        return initial_value

    extended._get_variable_creator_initial_value = creator_initial_value


def _value(initial: Any, dtype: Any) -> tf.Tensor:
    value = initial() if callable(initial) else initial
    # Of a variable that is restored from a checkpoint while it is made.
    return tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype)


def _carrier(dtype: tf.DType) -> tf.DType:
    """The dtype to send values of `dtype` as: the same where it is taken, or where there is no wider one."""
    if dtype in _TAKEN:
        return dtype
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype.is_integer else dtype
