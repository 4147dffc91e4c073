# SPDX-License-Identifier: Apache-2.0
"""Lets a loop without `strategy.run` train a model of a strategy, in its scope and outside, as on one device.

Guides on custom loops have no strategy: they call the model, a gradient tape and `optimizer.apply` directly. Each step
is then that of one device, with the first replica's copies of the variables, and its update is made on all copies.
TensorFlow and Keras refuse three parts of it, none of which has a public seam:

- `optimizer.apply` outside of the scope: Keras updates in the context of the caller, not in that of its strategy;
- `optimizer.apply` in the scope: see `cross_replica_updates`;
- the gradient tape in the scope: a mirrored variable has no `handle` there, though it is read from the first replica.

Each is replaced for good where it would have raised, and for the strategies that ask for it.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import backprop

from tfdist.compat import cross_replica_updates, replacing

# An attribute of the strategies that ask for it.
_MARK = "_tfdist_trains_in_plain_loops"


def allow(strategy: tf.distribute.Strategy) -> None:
    """Has loops without `run` train this strategy's models."""
    vars(strategy)[_MARK] = True
    cross_replica_updates.allow()
    replacing.once(BaseOptimizer, "apply", _applying)
    replacing.once(backprop, "_handle_or_self", _handle_or_self)


def _is_allowed(strategy: Any) -> bool:
    return getattr(strategy, _MARK, False) is True


def _applying(original: Any) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        strategy = getattr(self, "_distribution_strategy", None)
        if not _is_allowed(strategy) or tf.distribute.get_strategy() is strategy:
            return original(self, grads, trainable_variables)
        if not self.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            with tf.init_scope(), strategy.scope():
                self.build(trainable_variables)
        with strategy.scope():
            return original(self, grads, trainable_variables)

    return apply


def _handle_or_self(original: Any) -> Any:
    def handle_or_self(x: Any) -> Any:
        variable = getattr(x, "_value", x) if isinstance(x, keras.Variable) else x
        # Within `extended.update` there is a replica, though no replica context.
        is_updated = distribute_lib.get_update_replica_id() is not None
        is_outside = tf.distribute.in_cross_replica_context() and not is_updated
        is_variable = isinstance(variable, values.DistributedVariable)
        if is_variable and is_outside and _is_allowed(variable._distribute_strategy):
            return variable._get_on_device_or_primary().handle
        return original(x)

    return handle_or_self
