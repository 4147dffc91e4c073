# SPDX-License-Identifier: Apache-2.0
"""Follows Keras' layers while they are made and built, and its variables while they are created.

There is no public way: Keras has no hook for layers of other people's classes. `keras.Layer.__new__` is replaced, once
in a process, for all who follow; there Keras gives each layer a `build` of its own, which may be replaced again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state

from tfdist.compat import patching

NEEDS = (
    "keras.src.backend.common.global_state:get_global_attribute(name, default, set_to_default)",
    "keras:Variable._deferred_initialize",
)

Made = Callable[[keras.Layer], object]

_made: list[Made] = []
_DEFERRED = "uninitialized_variables"
_CREATE = "_deferred_initialize"


def after_making(note: Made) -> None:
    """Calls `note` with each layer that is made from now on, before its `__init__`; a function is added once."""
    if note not in _made:
        _made.append(note)
    patching.once(keras.Layer, "__new__", _making)


def around_build(layer: keras.Layer, make: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Enters what `make` returns where this layer makes variables, and around the creation of what it declares."""
    for name in filter(functools.partial(hasattr, layer), ("build", "quantize", "enable_lora")):
        patching.put(layer, name, _within(getattr(layer, name), make))


def _within(method: Callable[..., Any], make: Callable[[], contextlib.AbstractContextManager]) -> Callable[..., Any]:
    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        count = len(deferred())
        with make():
            result = method(*args, **kwargs)
        for variable in deferred()[count:]:
            around_deferred(variable, make)
        return result

    return within


def _making(original: Any, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    # Keras looks at the signature of `__init__`, not at that of this.
    layer = original(cls, *args, **kwargs)
    for note in _made:
        note(layer)
    return layer


def of_thread(name: str, default: Any = None) -> Any:
    """Value that Keras keeps under a name for this thread; if it keeps nothing, it keeps the default from now on."""
    return global_state.get_global_attribute(name, default, set_to_default=True)


def deferred() -> list[Any]:
    """The variables that Keras has declared in this thread, and creates later."""
    return of_thread(_DEFERRED) or []


def around_deferred(
    variable: keras.Variable, make: Callable[[], contextlib.AbstractContextManager], after: Callable[[], object] = bool
) -> None:
    """Enters what `make` returns around the creation of a declared variable, and calls `after` when that is done."""
    create = variable._deferred_initialize

    def create_within() -> None:
        if _CREATE in vars(variable):
            patching.remove(variable, _CREATE)
        with make():
            create()
        after()

    patching.put(variable, _CREATE, create_within)
