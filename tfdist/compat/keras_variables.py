# SPDX-License-Identifier: Apache-2.0
"""Finds the TensorFlow variable behind a Keras variable, and the strategy that has made it.

There is no public way: the public `value` of a Keras variable is what a scope that is entered says that it is, cast to
the dtype that computes. The variables of TensorFlow's strategies have no public name for their strategy.
"""

from __future__ import annotations

from typing import Any

NEEDS = (
    "keras:Variable._value",
    "keras:Variable._initialize",
    "tensorflow.python.distribute.values:DistributedVariable._distribute_strategy",
)


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable of a Keras variable, None if it is yet to be made; any other variable itself."""
    return getattr(variable, "_value", variable)


def with_tf_variable(variable: Any, value: Any) -> tuple[Any, str, Any]:
    """A change, for `optimizer_patches.attributes`, by which this is the variable behind a Keras variable."""
    return variable, "_value", value


def strategy_of(value: Any) -> Any:
    """The strategy in whose scope a TensorFlow variable was made, or None."""
    return getattr(value, "_distribute_strategy", None)
