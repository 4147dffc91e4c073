# SPDX-License-Identifier: Apache-2.0
"""A variable that belongs to one traced step.

There is no public way: `tf.Variable` can't be made while a function is traced, unless it outlives the function.
"""

from __future__ import annotations

import uuid
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

NEEDS = (
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._handle",
    "tensorflow.python.ops.resource_variable_ops:_variable_handle_from_shape_and_dtype",
)


class LocalVariable(resource_variable_ops.BaseResourceVariable):
    """Is made on the default device of the graph that is traced, and has its value anew each time that runs.

    Args:
      value: the value that it begins with, a tensor of that graph.
      trainable: whether gradient tapes watch it.
    """

    def __init__(self, value: tf.Tensor, trainable: bool = False) -> None:
        name = f"tfdist_local_{uuid.uuid4().hex}"
        handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
            value.shape, value.dtype, name, "local_variable", graph_mode=True
        )
        super().__init__(
            trainable=trainable,
            shape=value.shape,
            dtype=value.dtype,
            handle=handle,
            unique_id=name,
            handle_name=name,
            in_graph_mode=False,
        )
        made = self.assign(value, read_value=False)
        # The gradient of a loop asks for the shape of what the loop has read. It takes the handle from the loop's
        # results, of which TensorFlow does not know that it is the one that was assigned.
        with tf.control_dependencies([made]):
            self._handle = tf.identity(handle)

    def __deepcopy__(self, memo: Any) -> LocalVariable:
        raise NotImplementedError("a variable of one traced step has no copies")
