# SPDX-License-Identifier: Apache-2.0
"""Makes a Keras variable that was made outside of a strategy's scope one of the strategy.

Keras has no public way to replace the TensorFlow variable behind one of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist.compat import fresh_threads, keras_variables, own_attributes, placed_layers, replica_parts

NEEDS = ("keras:Variable._initialize",)

# Former variables are kept: functions that were traced with one read it as long as they live.
_FORMER = "_tfdist_former_values"
_MOVING = threading.Lock()


@tf.autograph.experimental.do_not_convert
def move(strategy: Any, variable: Any) -> None:
    """Gives a Keras variable a TensorFlow variable of the strategy, with the value that it has; from anywhere.

    Args:
      strategy: on several workers, all of them call this alike.
      variable: one of the strategy stays as it is.
    """
    with _MOVING:
        value = keras_variables.tf_variable(variable)
        if value is None or keras_variables.strategy_of(value) is strategy:
            return
        # In a graph, and on a replica, variables can't be made.
        fresh_threads.call(_make, strategy, variable, value)


def _make(strategy: Any, variable: Any, value: Any) -> None:
    with strategy.scope():
        variable._initialize(value.numpy())
    own_attributes.setdefault(variable, _FORMER, list).append(value)


@tf.autograph.experimental.do_not_convert
def move_to_part(strategy: Any, variable: Any, part: int) -> None:
    """Moves a Keras variable to the devices of a part of replicas that span devices, with the value that it has.

    A variable of a parameter server stays there, and is read to the devices of the part.

    Functions that were traced with the variable are not to be called any more.

    Args:
      strategy: on several workers, all of them call this alike.
      variable: of this part already, it stays as it is.
      part: the part.
    """
    if placed_layers.part_of(variable) == part:
        return
    parts = replica_parts.of(strategy)
    if parts is not None and not parts.hold_variables:
        placed_layers.give(variable, part)
        return
    value = keras_variables.tf_variable(variable)
    with strategy.scope(), placed_layers.creating(part):
        variable._initialize(value.numpy())
