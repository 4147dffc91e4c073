# SPDX-License-Identifier: Apache-2.0
"""The graphs that are traced at the moment, one within the other.

There is no public way from a graph to the one around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def enclosing() -> Iterator[Any]:
    """Yields the graph that is traced, and those around it; nothing where TensorFlow runs eagerly."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
