# SPDX-License-Identifier: Apache-2.0
"""Moves a seed generator that was made outside of a strategy's scope into it, when a replica draws from it first.

A `keras.random.SeedGenerator`, and a layer that has one, such as `Dropout`, is often made before the scope is entered.
Its state is then one variable, which all replicas advance: each step draws other numbers than on one device, and says
nothing. In the scope each replica has a copy of its own. Keras has no hook where a generator is used.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import moved_variables, replacing

# An attribute of the strategies that ask for it.
_MARK = "_tfdist_adopts_seed_generators"


def adopt(strategy: tf.distribute.Strategy) -> None:
    """Replaces the variables of seed generators that replicas draw from by variables of the strategy."""
    vars(strategy)[_MARK] = True
    replacing.once(keras.random.SeedGenerator, "next", _drawing)


def _drawing(original: Any) -> Any:
    def next(self: Any, ordered: bool = True) -> Any:  # noqa: A001, as Keras calls it
        context = tf.distribute.get_replica_context()
        strategy = None if context is None else context.strategy
        if getattr(strategy, _MARK, False):
            moved_variables.move(strategy, self.state)
        return original(self, ordered)

    return next
