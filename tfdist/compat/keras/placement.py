# SPDX-License-Identifier: Apache-2.0
"""Layers on the devices of a replica that spans several: their variables, gradients, and what follows them."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop

from tfdist.compat import patching
from tfdist.compat.keras import layers
from tfdist.compat.tensorflow import graphs, replicas, variables

NEEDS = (
    "tensorflow.python.distribute.values:DistributedValues._devices",
    "tensorflow.python.pywrap_tfe:TFE_Py_RegisterGradientFunction",
    "tensorflow.python.eager.backprop:_gradient_function(op_name, attr_tuple, num_inputs, inputs, outputs, out_grads)",
)


_PART = "_tfdist_part"
_MASK = "_keras_mask"
_part_of: weakref.WeakKeyDictionary[keras.Layer, int] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """The part that is entered in a thread, by `placed`."""

    part: int | None = None


_thread = _Thread()


def allow_placed_layers() -> None:
    """Makes layers that are created in `placed` from now on keep their part."""
    pywrap_tfe.TFE_Py_RegisterGradientFunction(functools.partial(_placing, backprop._gradient_function))
    layers.after_making(_remember)
    patching.once(keras.Layer, "__call__", _calling)


@contextlib.contextmanager
def placed(part: int | None) -> Iterator[None]:
    """Within this block, layers and variables that are made belong to a part; None changes nothing.

    Variables of a strategy whose replicas span devices are made on the devices of the part.
    """
    if part is None:
        yield
        return

    def create(next_creator: Any, **arguments: Any) -> Any:
        parts = replicas.parts_of(tf.distribute.get_strategy())
        # Slots of optimizers are made beside their variable.
        if parts is None or arguments.get("colocate_with") is not None:
            return next_creator(**arguments)
        if parts.hold_variables:
            # All that the strategy asks of the variable beside which it makes this one.
            arguments["colocate_with"] = types.SimpleNamespace(_devices=parts.devices_of(part))
        variable = next_creator(**arguments)
        patching.put(variable, _PART, part)
        return variable

    before, _thread.part = _thread.part, part
    count = len(layers.deferred())
    try:
        with tf.variable_creator_scope(create):
            yield
    finally:
        _thread.part = before
        for variable in layers.deferred()[count:]:
            # Of those that were declared in a block within this one, that has the part.
            if patching.get(variable, _PART) is None:
                patching.put(variable, _PART, part)
                # Unless it is made in `placed`.
                layers.around_deferred(variable, lambda: placed(part if _thread.part is None else None))


def current() -> int | None:
    """Returns the part that is entered in this thread, to be entered in another one."""
    return _thread.part


def place(layer: keras.Layer, part: int) -> None:
    """Gives a layer its part."""
    if layer not in _part_of:
        layers.around_build(layer, functools.partial(_around_placed, weakref.ref(layer)))
    _part_of[layer] = part


def part_of(variable: Any) -> int | None:
    """Returns the part of a Keras variable; None if it was made without a place."""
    return patching.get(variables.tf_variable(variable), _PART)


def give(variable: Any, part: int) -> None:
    """Reads a Keras variable of a parameter server to the device of a part; traced functions stay."""
    patching.put(variables.tf_variable(variable), _PART, part)


def reader_of(variable: Any, worker: str) -> str:
    """Returns the device of a worker, of which `worker` is the first, that reads a variable of a parameter server."""
    parts, part = replicas.parts_of(tf.distribute.get_strategy()), part_of(variable)
    return worker if parts is None or part is None else parts.groups[0][part]


def device_of(parts: replicas.ReplicaDevices, variable: Any) -> str:
    """Returns the device of this replica's copy of a variable, on a replica or outside of all."""
    value = variables.tf_variable(variable)
    copies = getattr(value, "values", [value])
    return copies[_replica() if len(copies) == len(parts.groups) else 0].device


def beside(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a replica that spans devices on the devices of their variables; None stays None."""
    parts = replicas.parts_of(tf.distribute.get_strategy())
    if parts is None:
        return list(gradients)
    return [
        gradient if gradient is None else replicas.to_device(gradient, device_of(parts, variable))
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _replica() -> int:
    return replicas.current() if tf.distribute.get_replica_context() is not None else 0


def _remember(layer: keras.Layer) -> None:
    # Models of layers run these where the layers are.
    if _thread.part is not None and not isinstance(layer, keras.Sequential):
        place(layer, _thread.part)


def _device(part: int) -> str | None:
    """Returns the device to compute a part on; None outside of replicas in a graph, such as one that is exported."""
    parts = replicas.parts_of(tf.distribute.get_strategy())
    if parts is None or part >= parts.count:
        return None
    # Eagerly, the chief of parameter servers computes.
    is_here = parts.hold_variables if tf.executing_eagerly() else not tf.distribute.in_cross_replica_context()
    return parts.groups[_replica()][part] if is_here else None


def _around_placed(layer: weakref.ref[keras.Layer]) -> contextlib.AbstractContextManager:
    part = _part_of.get(layer())
    return contextlib.nullcontext() if part is None else _placed_scope(part)


@contextlib.contextmanager
def _placed_scope(part: int) -> Iterator[None]:
    with placed(part), replicas.on_device(_device(part)):
        yield


def _calling(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    part = _part_of.get(self)
    if part is None:
        return original(self, *args, **kwargs)
    if device := _device(part):
        # The gradient of an operation is computed on the device of its inputs.
        args, kwargs = tf.nest.map_structure(lambda leaf: _moved(leaf, device), (args, kwargs))
    with _placed_scope(part):
        return original(self, *args, **kwargs)


def _moved(leaf: Any, device: str) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.resource:
        return leaf
    moved, mask = replicas.to_device(leaf, device), patching.get(leaf, _MASK)
    if moved is not leaf and mask is not None:
        patching.put(moved, _MASK, mask)
    return moved


# Computes the gradient of an operation on the device of the operation, where a replica spans several devices.
#
# `tf.GradientTape` computes all gradients on the device that is current where `gradient` is called, which would fetch
# the weights of all parts to it. There is no public way: TensorFlow has one function that looks up the gradient of an
# operation, and calls the last one that was registered. The replacement is permanent; it changes nothing for operations
# that no strategy with replicas of several devices computes.


def _placing(
    original: Any, op_name: str, attributes: Any, num_inputs: int, inputs: Any, outputs: Any, out_grads: Any, *rest: Any
) -> Any:
    with replicas.on_device(_device_of_gradient([*(outputs or ()), *(inputs or ()), *(out_grads or ())])):
        return original(op_name, attributes, num_inputs, inputs, outputs, out_grads, *rest)


def _device_of_gradient(tensors: Iterable[Any]) -> str | None:
    """Returns the device of the first tensor that says so: TensorFlow keeps those that the gradient needs."""
    parts = replicas.parts_of(tf.distribute.get_strategy())
    for tensor in tensors if parts else ():
        if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.resource and tensor.device:
            return tensor.device if parts.part_on(tensor.device) is not None else None
    return None


# Computes what no layer does, such as losses and clipping, on the device of the data, where a replica spans devices.
#
# Without it the first device of a replica would have all of it, with the gradients of all parts. `tf.device` takes no
# function in TensorFlow 2, and a strategy has no public seam around what its replicas trace.


def follow_devices(strategy: Any) -> None:
    """Makes replicas of the strategy trace functions in `following`."""
    stock = strategy.extended.call_for_each_replica

    def call_for_each_replica(fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        @tf.autograph.experimental.do_not_convert
        def followed(*args: Any, **kwargs: Any) -> Any:
            with following(strategy):
                return fn(*args, **kwargs)

        # TensorFlow knows a `tf.function` by its type.
        is_traced_apart = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        return stock(fn if is_traced_apart else followed, args, kwargs)

    strategy.extended.call_for_each_replica = call_for_each_replica


@contextlib.contextmanager
def following(strategy: Any) -> Iterator[None]:
    """Within this block, if replicas span devices, operations traced without a device follow their largest input."""
    parts = replicas.parts_of(strategy)
    if parts is None or tf.executing_eagerly():
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    with graph.device(functools.partial(_followed_device, parts)):
        yield


def _followed_device(parts: replicas.ReplicaDevices, operation: Any) -> str:
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
        outer = graphs.captured_by(operation.inputs[0])
        tensor = operation.inputs[0] if outer is None else outer
    return tensor.device or ""


def _size(tensor: tf.Tensor) -> int:
    # An unknown axis is that of the examples: a batch has several.
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [None]
    return functools.reduce(lambda total, size: total * (8 if size is None else size), sizes, 1)
