# SPDX-License-Identifier: Apache-2.0
"""Gives replicas the seed generator of the thread that runs them, for `keras.random` without a seed.

Keras keeps that generator in the state of a thread, and TensorFlow traces each replica in a thread of its own, where
Keras would make another one: a variable that is made while a step is traced, which is an error. Keras has no public
name for the generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.compat import autograph_rules, keras_variables, replicas

NEEDS = (
    "keras.src.backend.common.global_state:get_global_attribute",
    "keras.src.backend.common.global_state:set_global_attribute",
    "keras.src.random.seed_generator:global_seed_generator",
)

# The name under which Keras keeps it.
_NAME = "global_seed_generator"
# An attribute of a strategy: (a generator made outside of its scope, a copy of it in the scope).
_COPY = "_tfdist_global_seeds"


def are_made() -> bool:
    """Returns True if Keras has made the generator in this thread."""
    return global_state.get_global_attribute(_NAME) is not None


def carried(strategy: tf.distribute.Strategy, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which finds the generator of the thread that calls this in any other thread."""
    generator = global_state.get_global_attribute(_NAME)
    # A worker may have drawn alone, and making a variable takes all workers. And TensorFlow knows a `tf.function` by
    # its type.
    is_traced_apart = isinstance(function, tf.types.experimental.PolymorphicFunction)
    if generator is None or replicas.has_other_workers(strategy) or is_traced_apart:
        return function
    generator, function = _of_strategy(strategy, generator), autograph_rules.converted(function)

    def on_replica(*args: Any, **kwargs: Any) -> Any:
        _adopt(generator)
        return function(*args, **kwargs)

    return on_replica


@tf.autograph.experimental.do_not_convert
def _adopt(generator: keras.random.SeedGenerator) -> None:
    if global_state.get_global_attribute(_NAME) is None:
        global_state.set_global_attribute(_NAME, generator)


def _of_strategy(strategy: Any, generator: Any) -> Any:
    """The generator itself, or a copy of it in the scope if it was made outside: replicas would share its variable."""
    state = keras_variables.tf_variable(generator.state)
    if strategy.num_replicas_in_sync == 1 or keras_variables.strategy_of(state) is strategy:
        return generator
    original, copy = vars(strategy).get(_COPY, (None, None))
    if original is not generator:
        with tf.init_scope(), strategy.scope():
            copy = keras.random.SeedGenerator(generator.get_config()["seed"])
        vars(strategy)[_COPY] = generator, copy
    return copy
