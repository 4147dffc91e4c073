# SPDX-License-Identifier: Apache-2.0
"""Creates the variables that a model's symbolic build asks for at once, with what is written to them meanwhile.

Under a strategy Keras builds a model by calling it in a `keras.StatelessScope`. Such a scope creates variables when it
ends, with their initial values, and drops all writes. So a checkpoint that is restored into the model as it is built
(`tf.train.Checkpoint(model=model).restore(path)` before `fit`) is lost without a word, and so is what a layer's `build`
assigns. There is no public way to have a variable created within the scope.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, variables

from tfdist.compat import own_attributes, replacing

NEEDS = (
    "keras.src.backend.common.global_state:get_global_attribute",
    "keras.src.backend.common.global_state:set_global_attribute",
    "keras.src.backend.common.stateless_scope:StatelessScope.original_scope",
    "keras:Variable._deferred_initialize",
    "keras:Variable._direct_assign",
    "keras.src.backend.common.variables:register_uninitialized_variable",
)

# An attribute of strategies, and one of scopes: gives the context in which variables are made.
_MARK = "_tfdist_makes_at_once"
MAKE = "_tfdist_make"
# An attribute of variables: the scope in which they were made.
_MADE_IN = "_tfdist_made_in"
_SCOPE = "stateless_scope"
_thread = threading.local()


def make_at_once(strategy: tf.distribute.Strategy) -> None:
    """Makes symbolic builds under this strategy create variables at once. The replaced functions stay replaced."""
    vars(strategy)[_MARK] = True
    replacing.once(variables, "register_uninitialized_variable", _registering)
    replacing.once(keras.StatelessScope, "add_update", _updating)


def num_made() -> int:
    """Returns how many variables this thread has created in such scopes so far."""
    return getattr(_thread, "count", 0)


def write_constant(scope: Any, variable: Any, value: Any) -> None:
    """Writes a constant to a variable that was made in this scope, or in a scope within it."""
    if own_attributes.of(variable, _MADE_IN) is not _outermost(scope):
        return
    constant = tf.get_static_value(value) if tf.is_tensor(value) else value
    if constant is not None:
        with _left_scope(), tf.init_scope():
            variable._direct_assign(constant)


def _registering(original: Any) -> Callable[[Any], None]:
    def register(variable: Any) -> None:
        strategy = tf.distribute.get_strategy()
        scope = _outermost(global_state.get_global_attribute(_SCOPE))
        make = getattr(scope, MAKE, None)
        if make is None and type(scope) is keras.StatelessScope and getattr(strategy, _MARK, False):
            make = strategy.scope
        # The others are read by a reduction over all replicas, for which a symbolic build has no use.
        if make is None or variable.synchronization == "on_read":
            original(variable)
            return
        with _left_scope(), tf.init_scope(), make():
            variable._deferred_initialize()
        own_attributes.put(variable, _MADE_IN, scope)
        _thread.count = num_made() + 1

    return register


def _updating(original: Any) -> Callable[..., None]:
    def add_update(self: Any, update: tuple[Any, Any]) -> None:
        original(self, update)
        write_constant(self, *update)

    return add_update


def _outermost(scope: Any) -> Any:
    while getattr(scope, "original_scope", None) is not None:
        scope = scope.original_scope
    return scope


@contextlib.contextmanager
def _left_scope() -> Iterator[None]:
    scope = global_state.get_global_attribute(_SCOPE)
    global_state.set_global_attribute(_SCOPE, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_SCOPE, scope)
