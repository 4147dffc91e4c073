# SPDX-License-Identifier: Apache-2.0
"""Moves a seed generator that was made outside of a strategy's scope into it, when a replica draws from it first.

A `keras.random.SeedGenerator`, and a layer that has one, such as `Dropout`, is often made before the scope is entered.
Its state is then one variable, which all replicas advance: each step draws other numbers than on one device, and says
nothing. In the scope each replica has a copy of its own. Keras has no public way to replace the TensorFlow variable
behind one of its own, and no hook where a generator is used.
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import replacing

# An attribute of the strategies that ask for it.
_MARK = "_tfdist_adopts_seed_generators"
# Former variables are kept: functions that were traced with one read it as long as they live.
_FORMER = "_tfdist_former_values"
_ADOPTING = threading.Lock()


def adopt(strategy: tf.distribute.Strategy) -> None:
    """Has seed generators that this strategy's replicas draw from become variables of the strategy."""
    vars(strategy)[_MARK] = True
    replacing.once(keras.random.SeedGenerator, "next", _drawing)


def _drawing(original: Any) -> Any:
    def next(self: Any, ordered: bool = True) -> Any:  # noqa: A001, as Keras calls it
        context = tf.distribute.get_replica_context()
        strategy = None if context is None else context.strategy
        if getattr(strategy, _MARK, False):
            _move(strategy, self.state)
        return original(self, ordered)

    return next


@tf.autograph.experimental.do_not_convert
def _move(strategy: Any, state: Any) -> None:
    with _ADOPTING:
        value = state._value
        if value is None or getattr(value, "_distribute_strategy", None) is strategy:
            return
        # A thread starts outside of any graph and of any replica, where variables can't be made.
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfdist variable") as thread:
            thread.submit(_make, strategy, state, value).result()


def _make(strategy: Any, state: Any, value: Any) -> None:
    with strategy.scope():
        state._initialize(value.numpy())
    object.__setattr__(state, _FORMER, [*getattr(state, _FORMER, ()), value])
