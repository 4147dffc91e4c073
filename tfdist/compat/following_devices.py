# SPDX-License-Identifier: Apache-2.0
"""Computes what no layer does, such as losses and clipping, on the device of the data, where a replica spans devices.

Without it the first device of a replica would have all of it, with the gradients of all parts. `tf.device` takes no
function in TensorFlow 2, and a strategy has no public seam around what its replicas trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import replica_parts

NEEDS = ("tensorflow.python.distribute.distribute_lib:StrategyExtendedV1.call_for_each_replica",)


def follow(strategy: Any, parts: replica_parts.Parts) -> None:
    """Places operations that the strategy's replicas trace without a device beside their largest input."""
    extended = strategy.extended
    stock = extended.call_for_each_replica

    def call_for_each_replica(fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TensorFlow knows a `tf.function` by its type.
        is_traced_apart = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        return stock(fn if is_traced_apart else following(parts, fn), args, kwargs)

    extended.call_for_each_replica = call_for_each_replica


def of_strategy(strategy: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, whose operations in a graph follow their largest input if the replicas span devices."""
    parts = replica_parts.of(strategy)
    return following(parts, function) if parts else function


def following(parts: replica_parts.Parts, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, whose operations in a graph follow their largest input."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args, **kwargs)
        graph: Any = tf.compat.v1.get_default_graph()
        with graph.device(functools.partial(_device, parts)):
            return function(*args, **kwargs)

    return tf.autograph.experimental.do_not_convert(call)


def _device(parts: replica_parts.Parts, operation: Any) -> str:
    """Returns the device for an operation that is being made; an empty one leaves it where the replica computes."""
    if operation.device or any(each.dtype == tf.resource for each in operation.inputs):
        return operation.device
    homes = [(_home(each), _size(each)) for each in operation.inputs]
    known = [(device, size) for device, size in homes if parts.part_on(device) is not None]
    return max(known, key=lambda pair: pair[1])[0] if known else ""


def _home(tensor: tf.Tensor) -> str:
    """Returns the device of a tensor; of a variable's value that is read outside of layers, that of the variable."""
    operation = tensor.op
    while operation.type == "Identity" and not tensor.device:
        tensor = operation.inputs[0]
        operation = tensor.op
    if operation.type == "ReadVariableOp" and not tensor.device:
        tensor = _captured(operation.inputs[0])
    return tensor.device or ""


def _captured(handle: tf.Tensor) -> tf.Tensor:
    captures = getattr(handle.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is handle), handle)


def _size(tensor: tf.Tensor) -> int:
    # An unknown axis is that of the examples: a batch has several.
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [None]
    return functools.reduce(lambda total, size: total * (8 if size is None else size), sizes, 1)
