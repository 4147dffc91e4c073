# SPDX-License-Identifier: Apache-2.0
"""Control dependencies by which a step without an input batch writes to no variable.

If the length of the data is unknown, Keras runs one more step at their end. TensorFlow executes the operations of this
step that need no input until the iterator raises: `optimizer.iterations` would count a step that ran on no data, and a
replica that meets the end later than another would count it alone. So every variable write that doesn't depend on the
input batch is ordered behind it. Reads and constants are not: this would cost a small model a twentieth of its time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import graphs

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"})
# TensorFlow starts operations inside of these functions before all inputs of the call are there.
_OF_FUNCTIONS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "Case"})


@contextlib.contextmanager
def writes_after_inputs(data: Mapping[str, Any]) -> Iterator[None]:
    """Orders the variable writes that are traced in this context behind the input batch of their device.

    Outside of a graph the batch has arrived already, and this does nothing.

    Args:
      data: the step's input on each device, by the device's name: structures of the graph's tensors and composites, in
        which anything else is ignored.
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
            graphs.wait_for_operation(operation, ready.get(operation.device, first))
            is_behind = True
        if is_behind:
            behind.add(operation)


def _tensors(given: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(given, expand_composites=True) if tf.is_symbolic_tensor(leaf)]


def _after(device: str, tensors: list[tf.Tensor]) -> tf.Operation:
    # On the device of the waiting operation: a control dependency between two devices costs a message.
    with tf.device(device), tf.control_dependencies(tensors):
        return tf.no_op()


def _writes(operation: tf.Operation) -> bool:
    return operation.type not in _READS and any(tensor.dtype == tf.resource for tensor in operation.inputs)
