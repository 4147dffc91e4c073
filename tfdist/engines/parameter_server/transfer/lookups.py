# SPDX-License-Identifier: Apache-2.0
"""Rows of a variable are gathered where the variable is, once a step is traced."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat import graph_edits


def at_the_table(graph: Any) -> None:
    """Places embedding gathers on the device of the table.

    Keras gathers from what it has read: else the whole table would be sent to the worker for a few of its rows.

    Args:
      graph: a graph whose variables are captured, as it is being traced.
    """
    devices = {inner.name: outer.device for outer, inner in graph.captures if outer.dtype == tf.resource}
    for operation in graph.get_operations():
        if operation.type not in ("GatherV2", "GatherNd", "Shape"):
            continue
        chain = [operation]
        while chain[-1].inputs[0].op.type in ("Identity", "Cast"):
            chain.append(chain[-1].inputs[0].op)
        read = chain[-1].inputs[0].op
        if read.type == "ReadVariableOp" and read.inputs[0].name in devices:
            for each in chain:
                graph_edits.place(each, devices[read.inputs[0].name])
