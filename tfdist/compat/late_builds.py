# SPDX-License-Identifier: Apache-2.0
"""Builds a layer in the scope in which it was made, wherever it is called for the first time.

A layer that is made in the scope of a strategy is often built later, by its first call: in a loop of the user's own,
which need not be in the scope, or while a `tf.function` is traced. Keras makes the weights in the context of the
caller, so that they are none of the strategy's. Keras knows the strategy of optimizers and models and not that of
layers, and has no public seam at the moment of building.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import replacing

NEEDS = ("keras.src.layers.layer:Layer._open_name_scope",)

_redirecting: weakref.WeakKeyDictionary[tf.distribute.Strategy, Any] = weakref.WeakKeyDictionary()
_made_in: weakref.WeakKeyDictionary[keras.Layer, Any] = weakref.WeakKeyDictionary()


def allow(
    strategy: tf.distribute.Strategy,
    redirect: Callable[[tf.distribute.Strategy], contextlib.AbstractContextManager],
) -> None:
    """Makes layers that are created in this strategy's scope from now on build their variables in it.

    Args:
      strategy: the strategy.
      redirect: gives a context in which variables are made in the scope of the strategy that it is given.
    """
    _redirecting[strategy] = redirect
    replacing.once(keras.Layer, "__new__", _remembering)
    replacing.once(keras.Layer, "_open_name_scope", _opening)


def _remembering(original: Any) -> Any:
    # Keras looks at the signature of `__init__`, not at that of this.
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        layer, strategy = original(cls, *args, **kwargs), tf.distribute.get_strategy()
        if strategy in _redirecting:
            _made_in[layer] = weakref.ref(strategy)
        return layer

    return new


def _opening(original: Any) -> Any:
    def open_name_scope(self: Any) -> Any:
        strategy = None if self.built else _made_in.get(self, lambda: None)()
        if strategy is None or tf.distribute.get_strategy() is strategy:
            return original(self)
        return _both(_redirecting[strategy](strategy), original(self))

    return open_name_scope


@contextlib.contextmanager
def _both(one: contextlib.AbstractContextManager, other: contextlib.AbstractContextManager) -> Iterator[Any]:
    with one, other as entered:
        yield entered
