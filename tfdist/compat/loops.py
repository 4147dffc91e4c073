# SPDX-License-Identifier: Apache-2.0
"""Tells whether a traced operation is part of a loop.

There is no public way: TensorFlow's public graphs don't say which construct they are the body of.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs


def in_loop() -> bool:
    """Whether the operations traced now run once for each iteration of a `tf.while_loop`."""
    if tf.executing_eagerly():
        return False
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, control_flow_v2_func_graphs.WhileBodyFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
