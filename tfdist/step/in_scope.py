# SPDX-License-Identifier: Apache-2.0
"""Makes a variable in a strategy's scope from anywhere: outside of the scope, and while a function is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import placement
from tfdist.compat.tensorflow import graphs

# Arguments of a variable creator that `tf.Variable` accepts.
_ARGUMENTS = (
    "initial_value",
    "trainable",
    "name",
    "dtype",
    "synchronization",
    "aggregation",
    "shape",
    "caching_device",
)


def redirected(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Returns a context in which variables are made in the strategy's scope, outside of any graph."""
    return _redirected(strategy.scope, contextlib.nullcontext)


def colocating(
    strategy: tf.distribute.Strategy,
    scope: Callable[[], contextlib.AbstractContextManager],
    stock: Callable[[Any], contextlib.AbstractContextManager],
) -> Callable[[Any], contextlib.AbstractContextManager]:
    """Returns a `colocate_vars_with` that works outside of the scope, where an optimizer may be applied first.

    Args:
      strategy: the strategy.
      scope: enters the strategy's scope.
      stock: the strategy's own `colocate_vars_with`.
    """

    @contextlib.contextmanager
    def colocate_vars_with(variable: Any) -> Iterator[None]:
        if tf.distribute.get_strategy() is strategy:
            with stock(variable):
                yield
            return

        with _redirected(scope, lambda: stock(variable)):
            yield

    return colocate_vars_with


def _redirected(
    scope: Callable[[], contextlib.AbstractContextManager], colocate: Callable[[], contextlib.AbstractContextManager]
) -> contextlib.AbstractContextManager:
    def create(_: Any, **arguments: Any) -> Any:
        return graphs.call_outside(_make, scope, colocate, arguments, placement.current())

    return tf.variable_creator_scope(create)


def _make(
    scope: Callable[[], contextlib.AbstractContextManager],
    colocate: Callable[[], contextlib.AbstractContextManager],
    arguments: dict[str, Any],
    part: int | None,
) -> Any:
    with scope(), placement.creating(part), colocate():
        return tf.Variable(**{name: value for name, value in arguments.items() if name in _ARGUMENTS})
