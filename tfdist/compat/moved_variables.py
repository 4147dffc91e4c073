# SPDX-License-Identifier: Apache-2.0
"""Finds Keras variables that were made outside of a strategy's scope: refuses them, or makes them the strategy's own.

Keras has no public way to replace the TensorFlow variable behind one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.compat import creation_lines, fresh_threads, keras_variables, own_attributes, placed_layers, replica_parts

NEEDS = ("keras:Variable._initialize",)

# Former variables are kept: functions that were traced with one read it as long as they live.
_FORMER = "_tfdist_former_values"
_MOVING = threading.Lock()


def belongs_to(strategy: Any, variable: Any) -> bool:
    """Returns True if a variable, of Keras or TensorFlow, was made in the strategy's scope, or is yet to be made."""
    value = keras_variables.tf_variable(variable)
    # A variable in shards has no strategy of its own, unlike its shards. An attribute of its class, because one that a
    # metric's variable lacks would be looked for on the sum over all workers: a collective.
    return value is None or hasattr(type(value), "variables") or keras_variables.strategy_of(value) is strategy


def check_scope(strategy: Any, variables: Iterable[Any]) -> None:
    """Raises ValueError, with the line of the program, if one of these variables was made outside of the scope."""
    for variable in variables:
        if not belongs_to(strategy, variable):
            line = creation_lines.of(variable)
            name = getattr(variable, "path", None) or variable.name
            raise ValueError(
                "The model, its optimizer and its metrics must be made in the scope of "
                f"{type(strategy).__name__}. Put the lines that make them, and model.compile, under `with "
                f"strategy.scope():`. Received: variable {name!r}, made outside of it{f' at {line}' if line else ''}"
            )


@tf.autograph.experimental.do_not_convert
def move(strategy: Any, variable: Any) -> None:
    """Gives a Keras variable a TensorFlow variable of the strategy, with the value that it has; from anywhere.

    Args:
      strategy: on several workers, all of them call this alike.
      variable: one of the strategy stays as it is.
    """
    with _MOVING:
        value = keras_variables.tf_variable(variable)
        if belongs_to(strategy, variable):
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
