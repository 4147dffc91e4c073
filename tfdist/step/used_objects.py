# SPDX-License-Identifier: Apache-2.0
"""Finds the layers, optimizers and metrics that a function uses: arguments, its object, its closure, globals."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import models

_KERAS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
# Libraries whose objects hold none of a user's.
_LIBRARIES = ("tensorflow", "keras", "tfdist", "numpy", "builtins", "collections", "threading", "pathlib", "weakref")
_MAX_OBJECTS = 3000
_MAX_ITEMS = 200


def used_by(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The Keras layers (models among them), optimizers and metrics that a function can reach."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function, *arguments]
    while waiting and len(seen) < _MAX_OBJECTS:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            waiting.extend(_within(each))
    return [each for each in seen.values() if isinstance(each, _KERAS)]


def names_used_by(function: Callable[..., Any]) -> set[str]:
    """The global names and attributes in a function and in those written within it."""
    code = getattr(inner(function), "__code__", None)
    return {name for each in _codes(code) for name in each.co_names} if code else set()


def inner(function: Any) -> Any:
    """The Python function behind decorators, `functools.partial` and binding."""
    while True:
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            function = function.python_function
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def is_built(found: Any) -> bool:
    """Returns True if a layer with its sublayers, or an optimizer, is built."""
    if isinstance(found, keras.Layer):
        return all(layer.built or not models.is_callable(layer) for layer in models.layers_of(found))
    return not isinstance(found, keras.optimizers.Optimizer) or found.built


def may_make_more(model: keras.Model, step: str) -> bool:
    """Returns True if a step may create variables besides those that Keras creates by building model and loss.

    Args:
      model: a model that Keras has just built.
      step: the name of its method.
    """
    if any(is_overridden(model, name) for name in (step, "compute_loss", "compute_metrics")):
        return True
    # Keras builds it by a call with training=False.
    return step == "train_step" and any(
        models.takes_training(layer) and not is_of_keras(type(layer)) for layer in models.layers_of(model)
    )


def is_overridden(model: keras.Model, name: str) -> bool:
    """Returns True if this model overrides a method of `keras.Model`."""
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


def is_of_a_user(found: Any) -> bool:
    """Returns True if a layer or a sublayer is of a class outside of Keras."""
    layers = models.layers_of(found) if isinstance(found, keras.Layer) else ()
    return not all(is_of_keras(type(layer)) for layer in layers)


def is_of_keras(kind: type) -> bool:
    """Returns True for a class of Keras."""
    return kind.__module__.split(".")[0] == "keras"


def is_all_of_keras(instance: Any, function: Callable[..., Any] | None) -> bool:
    """Returns True if a loss or metric, and the function that it wraps, if any, are Keras' own."""
    is_function = function is None or (getattr(function, "__module__", None) or "").startswith("keras.")
    return is_function and is_of_keras(type(instance))


def has_keras_metrics_only(model: keras.Model) -> bool:
    """Returns True if a train step updates metrics as Keras does, and only those of Keras: none reads another variable.

    A metric, or a step, of the user's may read the model's weights, or what it has counted so far.
    """
    return not any(is_overridden(model, name) for name in ("train_step", "compute_metrics")) and all(
        is_all_of_keras(metric, models.function_of(metric)) for metric in model.metrics
    )


def _within(each: Any) -> Iterator[Any]:
    if isinstance(each, types.ModuleType | type | str | bytes | int | float | None):
        return
    if isinstance(each, dict):
        yield from list(each.values())[:_MAX_ITEMS]
    elif isinstance(each, list | tuple | set | frozenset):
        yield from list(each)[:_MAX_ITEMS]
    elif isinstance(each, types.FunctionType):
        yield from _of_function(each)
    elif callable(each) and inner(each) is not each:
        yield inner(each)
        yield getattr(each, "__self__", None)
        yield from (*each.args, *each.keywords.values()) if isinstance(each, functools.partial) else ()
    elif isinstance(each, keras.Layer):
        yield from (value for value in vars(each).values() if isinstance(value, (*_KERAS, list, tuple, dict)))
    elif not _is_of_a_library(type(each)):
        yield from list(getattr(each, "__dict__", {}).values())[:_MAX_ITEMS]


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    # The cell of a name that is not defined yet is empty.
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        # Keras' step of `predict` encloses its model.
        yield from (each for each in enclosed if isinstance(each, keras.Layer) and not is_built(each))
        return
    yield from enclosed
    yield from function.__defaults__ or ()
    names = dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names)
    yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _LIBRARIES
