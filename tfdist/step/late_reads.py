# SPDX-License-Identifier: Apache-2.0
"""Weights that a train step reads after it has called `optimizer.apply`, found in the graph of the step.

Under policies the update is made after the step, so such a read gives the values before the update. Gradient functions
use a variable's handle without a read, so reads are detected by the traced operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import variables

_NO_READS = frozenset({"VariableShape", "VarIsInitializedOp"})


class LateReads:
    """Calls of `optimizer.apply` in one trace of a step, and the variables read after them."""

    def __init__(self) -> None:
        # (graph of the call, its number of operations, the variables).
        self._calls: list[tuple[Any, int, Sequence[Any]]] = []

    def applied(self, variables: Sequence[Any]) -> None:
        """Notes that `optimizer.apply` was called for these Keras variables in the graph that is being traced."""
        graph: Any = tf.compat.v1.get_default_graph()
        self._calls.append((graph, len(graph.get_operations()), variables))

    def paths(self) -> list[str]:
        """Returns the paths of variables that the same graph reads after their call, once the step was traced."""
        found = {v.path: v for graph, count, variables in self._calls for v in _read(graph, count, variables)}
        return list(found)


def message(paths: Sequence[str]) -> str:
    """Returns a warning about such reads."""
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    return (
        "tfdist: policies: after optimizer.apply this train_step reads weights as they were before the update, which "
        "is made later from several replicas' gradients; to have the updated ones, train without a policy, or read "
        f"them in a callback's on_train_batch_end. Received: a read of {paths[0]!r}{others}"
    )


def _read(graph: Any, count: int, variables: Sequence[Any]) -> list[Any]:
    operations = [operation for operation in graph.get_operations()[count:] if operation.type not in _NO_READS]
    inputs = {tensor.name for operation in operations for tensor in operation.inputs}
    captured = [outside for outside, inside in graph.captures if inside.name in inputs]
    return [
        variable
        for variable in variables
        if any(outside is each for outside in captured for each in _handles(variable))
    ]


def _handles(variable: Any) -> list[Any]:
    """Returns the handles of a Keras variable's copies."""
    value = variables.tf_variable(variable)
    copies = getattr(value, "values", None) or [value]
    return [copy.handle for copy in copies if hasattr(copy, "handle")]
