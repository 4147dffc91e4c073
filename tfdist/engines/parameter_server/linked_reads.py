# SPDX-License-Identifier: Apache-2.0
"""Reads of a variable in shards whose gradients lead to the tensors that stand for the variable."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


@tf.custom_gradient
def linked(handle: tf.Tensor, value: tf.Tensor) -> Any:
    """Returns `value`, with its gradient that of `handle`."""
    del handle
    return tf.identity(value), lambda gradient: (gradient, None)


@tf.custom_gradient
def linked_twice(first: tf.Tensor, anchor: tf.Tensor, value: tf.Tensor) -> Any:
    """Returns `value`, with its gradient that of both handles, of which a step takes one."""
    del first, anchor
    return tf.identity(value), lambda gradient: (gradient, gradient, None)
