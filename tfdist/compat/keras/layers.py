# SPDX-License-Identifier: Apache-2.0
"""Follows Keras' layers while they are made, and while they open their name scope to be built or called.

There is no public way: Keras has hooks at neither moment for layers of other people's classes. Both methods are
replaced once in a process, for all who follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.compat import patching

NEEDS = ("keras.src.layers.layer:Layer._open_name_scope",)

Made = Callable[[keras.Layer], object]
Around = Callable[[keras.Layer], contextlib.AbstractContextManager | None]

_made: list[Made] = []
_around: list[Around] = []


def after_making(note: Made) -> None:
    """Calls `note` with each layer that is made from now on; a function is added once."""
    if note not in _made:
        _made.append(note)
    patching.once(keras.Layer, "__new__", _making)


def around_name_scope(make: Around) -> None:
    """Enters what `make` returns for a layer, if anything, around its name scope; a function is added once."""
    if make not in _around:
        _around.append(make)
    patching.once(keras.Layer, "_open_name_scope", _opening)


def _making(original: Any) -> Any:
    # Keras looks at the signature of `__init__`, not at that of this.
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer = original(cls, *args, **kwargs)
        for note in _made:
            note(layer)
        return layer

    return new


def _opening(original: Any) -> Any:
    def open_name_scope(self: Any) -> Any:
        contexts = [context for make in _around if (context := make(self)) is not None]
        return _entered(contexts, original(self)) if contexts else original(self)

    return open_name_scope


@contextlib.contextmanager
def _entered(contexts: list[contextlib.AbstractContextManager], scope: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield stack.enter_context(scope)
