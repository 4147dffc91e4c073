# SPDX-License-Identifier: Apache-2.0
"""Edits operations of a graph that is being traced: their inputs, their devices and what they wait for.

There is no public way to change an operation that exists: TensorFlow's public graphs grow only. An edit stays with the
graph, which belongs to the step that is traced, so there is nothing to restore.
"""

from __future__ import annotations

import tensorflow as tf

NEEDS = (
    "tensorflow.python.framework.ops:Operation._add_control_input",
    "tensorflow.python.framework.ops:Operation._set_device",
    "tensorflow.python.framework.ops:Operation._update_input",
)


def wait_for(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes an operation begin after another one has ended."""
    operation._add_control_input(other)


def give(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives an operation this tensor as the input of this index."""
    operation._update_input(index, tensor)


def place(operation: tf.Operation, device: str) -> None:
    """Places an operation on a device."""
    operation._set_device(device)
