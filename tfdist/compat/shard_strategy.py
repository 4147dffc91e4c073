# SPDX-License-Identifier: Apache-2.0
"""Makes a parameter-server strategy update variables in shards shard by shard, and put their slots beside them.

There is no public way: `strategy.extended` updates a variable whole, can't be replaced, and counts the variables that
it has made to find the next one's parameter server. The replacement of `_update` lives and ends with the strategy. The
one of Keras' optimizers is permanent, and only notes which optimizer makes an update.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import optimizer_patches, replacing

NEEDS = (
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._distributed_tf_update_step",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._update",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._variable_count",
)

# Optimizers whose update of an element needs no other element of the variable.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.RMSprop,
    keras.optimizers.Lion,
)


class _Updating(threading.local):
    is_elementwise = True


_updating = _Updating()


def replace_update(strategy: Any, wrap: Callable[[Any, Callable[[], bool]], Any]) -> None:
    """Replaces how a strategy updates a variable.

    Args:
      strategy: a `tf.distribute.ParameterServerStrategy`.
      wrap: called with the strategy's own `_update`, and with a function that returns False within the update of an
        optimizer that needs the whole variable; returns what takes its place.
    """
    replacing.once(_class_of_update(), optimizer_patches.UPDATE, _noting)
    strategy.extended._update = wrap(strategy.extended._update, lambda: _updating.is_elementwise)


def server_of(strategy: Any, beside: Any = None) -> int:
    """Returns the parameter server of the next variable, or of its first shard.

    Args:
      strategy: a `tf.distribute.ParameterServerStrategy`.
      beside: variable on whose server, or servers, the next one is put; None for the next in turn.
    """
    if beside is not None:
        return tf.DeviceSpec.from_string(beside.device).task or 0
    return strategy.extended._variable_count


@contextlib.contextmanager
def beside(strategy: Any, first: Any) -> Iterator[None]:
    """Context in which the shards of a new variable are put on the servers of another variable's shards.

    Args:
      strategy: a `tf.distribute.ParameterServerStrategy`.
      first: the first shard of the other variable.
    """
    extended = strategy.extended
    before = extended._variable_count
    extended._variable_count = tf.DeviceSpec.from_string(first.device).task
    try:
        yield
    finally:
        extended._variable_count = before


def _class_of_update() -> Any:
    return next(each for each in keras.optimizers.Optimizer.__mro__ if optimizer_patches.UPDATE in vars(each))


def _noting(original: Any) -> Any:
    def update(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before, _updating.is_elementwise = _updating.is_elementwise, _is_elementwise(optimizer)
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            _updating.is_elementwise = before

    return update


def _is_elementwise(optimizer: Any) -> bool:
    return any(type(optimizer).update_step is each.update_step for each in _ELEMENTWISE)
