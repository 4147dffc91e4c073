# SPDX-License-Identifier: Apache-2.0
"""Keeps a step whose data don't come from being made in part.

Keras tries another step at the end of data whose length is not known. TensorFlow makes the parts of it that need none
until it hears of the end: `optimizer.iterations` would count a step that was none, and a replica that heard of it later
than another would count it alone. So whatever writes to a variable without needing the data is ordered behind them.
Only that: to order the many reads and constants of a step as well costs a small model a twentieth of its time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.compat import graph_edits

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"})
# Of these TensorFlow begins the parts that need nothing, whatever the others wait for.
_OF_FUNCTIONS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "Case"})


@contextlib.contextmanager
def or_none(data: Mapping[str, Any]) -> Iterator[None]:
    """A context of whose operations none writes to a variable before the data of its device have come.

    Outside of a graph data have come where there are any, and this does nothing.

    Args:
      data: what the step is given on each device, by the device's name: structures of the graph's tensors and
        composites, in which anything else is ignored.
    """
    leaves = {device: _tensors(given) for device, given in data.items()}
    if tf.executing_eagerly() or not any(leaves.values()):
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    ready = {device: _after(device, tensors) for device, tensors in leaves.items()}
    (first, *_), made = ready.values(), len(graph.get_operations())
    yield
    behind = {*ready.values(), *(tensor.op for tensors in leaves.values() for tensor in tensors)}
    for operation in graph.get_operations()[made:]:
        needs = {*operation.control_inputs, *(tensor.op for tensor in operation.inputs)}
        is_behind = not behind.isdisjoint(needs)
        if _writes(operation) and (not is_behind or operation.type in _OF_FUNCTIONS):
            graph_edits.wait_for(operation, ready.get(operation.device, first))
            is_behind = True
        if is_behind:
            behind.add(operation)


def _tensors(given: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(given, expand_composites=True) if tf.is_symbolic_tensor(leaf)]


def _after(device: str, tensors: list[tf.Tensor]) -> tf.Operation:
    # On the device of what waits for it: an order between two devices is a message.
    with tf.device(device), tf.control_dependencies(tensors):
        return tf.no_op()


def _writes(operation: tf.Operation) -> bool:
    return operation.type not in _READS and any(tensor.dtype == tf.resource for tensor in operation.inputs)
