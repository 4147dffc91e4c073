# SPDX-License-Identifier: Apache-2.0
"""Tells whether a traced operation is part of a function given to a `tf.data.Dataset`, such as that of `map`.

There is no public way: TensorFlow's public graphs don't say which construct they are the body of.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PREFIX = "Dataset_"


def is_traced() -> bool:
    """Whether the operations traced now run for each element of a data set."""
    if tf.executing_eagerly():
        return False
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "name", "").startswith(_PREFIX):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
