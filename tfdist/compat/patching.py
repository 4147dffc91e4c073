# SPDX-License-Identifier: Apache-2.0
"""Attributes of tfdist's own on objects of TensorFlow and Keras, and replacements of their functions.

An attribute has the lifetime of its object. There is no public way: Keras' layers and optimizers track what is assigned
to them, save it, and refuse it once they are locked. Weak references would not do either, because what is kept for a
tensor, a graph or a data set often refers to it. A method put on an instance takes the place of the one of its class
until it is removed.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any


def put(target: Any, name: str, value: Any) -> None:
    """Sets an attribute of this one object, past the bookkeeping of its class."""
    try:
        object.__setattr__(target, name, value)
    except TypeError:  # an object of C++ code, such as a graph
        setattr(target, name, value)


def put_method(target: Any, name: str, function: Callable[..., Any], *given: Any) -> None:
    """Gives this one object a method, which calls `function(target, *given, ...)`.

    The object is referred to weakly: in a circle with its own method it would live until Python collects garbage.
    """
    put(target, name, functools.partial(_call_method, weakref.ref(target), function, *given))


def _call_method(target: Callable[[], Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(target(), *args, **kwargs)


def remove(target: Any, name: str) -> None:
    """Removes an attribute that `put` has set."""
    object.__delattr__(target, name)


def get(target: Any, name: str, default: Any = None) -> Any:
    """An attribute of the object itself, not of its class; `default` if it has none of this name."""
    return getattr(target, "__dict__", {}).get(name, default)


def setdefault(target: Any, name: str, make: Callable[[], Any]) -> Any:
    """An attribute of tfdist's own, which `make` gives the first time."""
    found = getattr(target, name, None)
    if found is None:
        found = make()
        put(target, name, found)
    return found


def once(
    owner: Any, name: str, function: Callable[..., Any], *given: Any, decorate: Callable[[Any], Any] = lambda call: call
) -> None:
    """Makes `owner.name` call `function(owner.name, *given, ...)`, unless this `function` has replaced it before.

    Args:
      owner: a module or a class.
      name: of a function or a method of it.
      function: called with the original, `given`, and the arguments of the call.
      given: arguments.
      decorate: changes what takes the place of the original, with the original's name and signature.
    """
    original, mark = getattr(owner, name), f"_tfdist_{function.__module__}.{function.__qualname__}"
    if not hasattr(original, mark):

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *given, *args, **kwargs)

        # `wraps` takes over the marks of earlier replacements of the original.
        replacement = functools.wraps(original)(decorate(call))
        setattr(replacement, mark, True)
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
