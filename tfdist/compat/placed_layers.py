# SPDX-License-Identifier: Apache-2.0
"""Runs a layer on the device that its replica has for the layer's part, and makes the layer's variables there.

A layer is given its part while it is made. Keras has no public seam around both `build` and `call`, and a strategy
makes variables on the devices that it computes on, or on those of another variable: `OnDevices` stands for one.
Variables on parameter servers stay there, and are read to the device of their part.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_variables, own_attributes, placed_gradients, replacing, replica_parts, replicas

NEEDS = ("keras.src.layers.layer:Layer._open_name_scope", "keras:Variable._initialize")

_PART = "_tfdist_part"
# Of a Keras variable, whose TensorFlow variable is made later while Keras builds a model symbolically.
_WANTED = "_tfdist_wanted_part"
_MASK = "_keras_mask"
_part_of: weakref.WeakKeyDictionary[keras.Layer, int] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """Parts that are entered in a thread.

    Attributes:
      making: of `placed`, where layers get the part.
      creating: of `creating`, where variables get it.
    """

    making: int | None = None
    creating: int | None = None


_thread = _Thread()


def allow() -> None:
    """Makes layers that are created in `placed` from now on keep their part."""
    placed_gradients.install()
    replacing.once(keras.Layer, "__new__", _remembering)
    replacing.once(keras.Layer, "__call__", _calling)
    replacing.once(keras.Layer, "_open_name_scope", _opening)
    replacing.once(keras.Variable, "__init__", _noting)
    replacing.once(keras.Variable, "_initialize", _initializing)


@contextlib.contextmanager
def placed(part: int) -> Iterator[None]:
    """Within this block, layers and variables that are made belong to a part."""
    before, _thread.making = _thread.making, part
    try:
        with creating(part):
            yield
    finally:
        _thread.making = before


@contextlib.contextmanager
def creating(part: int | None) -> Iterator[None]:
    """Within this block, variables of a strategy whose replicas span devices are made for a part, on its devices."""
    if part is None:
        yield
        return

    def create(next_creator: Any, **arguments: Any) -> Any:
        parts = replica_parts.of(tf.distribute.get_strategy())
        # Slots of optimizers are made beside their variable.
        if parts is None or arguments.get("colocate_with") is not None:
            return next_creator(**arguments)
        if parts.hold_variables:
            arguments["colocate_with"] = replica_parts.OnDevices(parts.devices_of(part))
        variable = next_creator(**arguments)
        own_attributes.put(variable, _PART, part)
        return variable

    before, _thread.creating = _thread.creating, part
    try:
        with tf.variable_creator_scope(create):
            yield
    finally:
        _thread.creating = before


def current() -> int | None:
    """Returns the part that variables of this thread are made for, to be entered in another thread."""
    return _thread.creating


def place(layer: keras.Layer, part: int) -> None:
    """Gives a layer its part."""
    _part_of[layer] = part


def part_of(variable: Any) -> int | None:
    """Returns the part of a Keras variable; None if it was made without a place."""
    return own_attributes.of(keras_variables.tf_variable(variable), _PART)


def give(variable: Any, part: int) -> None:
    """Reads a Keras variable of a parameter server to the device of a part; traced functions stay."""
    own_attributes.put(keras_variables.tf_variable(variable), _PART, part)


def reader_of(variable: Any, worker: str) -> str:
    """Returns the device of a worker that reads a Keras variable of a parameter server.

    Args:
      variable: the variable.
      worker: the first device of the worker.
    """
    parts, part = replica_parts.of(tf.distribute.get_strategy()), part_of(variable)
    return worker if parts is None or part is None else parts.groups[0][part]


def device_of(parts: replica_parts.Parts, variable: Any) -> str:
    """Returns the device of this replica's copy of a variable, on a replica or outside of all."""
    value = keras_variables.tf_variable(variable)
    copies = getattr(value, "values", [value])
    return copies[_replica() if len(copies) == len(parts.groups) else 0].device


def beside(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a replica that spans devices on the devices of their variables; None stays None."""
    parts = replica_parts.of(tf.distribute.get_strategy())
    if parts is None:
        return list(gradients)
    return [
        gradient if gradient is None else replica_parts.to_device(gradient, device_of(parts, variable))
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _replica() -> int:
    return replicas.current() if tf.distribute.get_replica_context() is not None else 0


def _remembering(original: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = original(cls, *args, **kwargs)
        # Models of layers run these where the layers are.
        if _thread.making is not None and not isinstance(layer, keras.Sequential):
            _part_of[layer] = _thread.making
        return layer

    return new


def _noting(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _thread.creating is not None:
            own_attributes.put(self, _WANTED, _thread.creating)
        original(self, *args, **kwargs)

    return init


def _initializing(original: Any) -> Any:
    def initialize(self: Any, value: Any) -> None:
        with creating(own_attributes.of(self, _WANTED) if _thread.creating is None else None):
            original(self, value)

    return initialize


def _device(part: int) -> str | None:
    """Returns the device to compute a part on; None outside of replicas in a graph, such as one that is exported."""
    strategy = tf.distribute.get_strategy()
    parts = replica_parts.of(strategy)
    if parts is None or part >= parts.count:
        return None
    is_on_replica = not tf.distribute.in_cross_replica_context()
    if tf.executing_eagerly():
        # Eagerly, the chief of parameter servers computes.
        return parts.groups[_replica()][part] if parts.hold_variables else None
    return parts.groups[_replica()][part] if is_on_replica else None


def _opening(original: Any) -> Any:
    def open_name_scope(self: Any) -> Any:
        part = _part_of.get(self)
        return original(self) if part is None else _placed_scope(part, original(self))

    return open_name_scope


@contextlib.contextmanager
def _placed_scope(part: int, scope: Any) -> Iterator[Any]:
    with creating(part), replica_parts.on(_device(part)), scope as entered:
        yield entered


def _calling(original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = _part_of.get(self)
        device = None if part is None else _device(part)
        if device is None:
            return original(self, *args, **kwargs)
        # The gradient of an operation is computed on the device of its inputs.
        args, kwargs = tf.nest.map_structure(lambda leaf: _moved(leaf, device), (args, kwargs))
        return original(self, *args, **kwargs)

    return call


def _moved(leaf: Any, device: str) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.resource:
        return leaf
    moved, mask = replica_parts.to_device(leaf, device), own_attributes.of(leaf, _MASK)
    if moved is not leaf and mask is not None:
        own_attributes.put(moved, _MASK, mask)
    return moved
