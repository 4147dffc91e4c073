# SPDX-License-Identifier: Apache-2.0
"""A variable of this process alone.

There is no public way: within a scope `tf.Variable` makes one of the strategy's, with a copy on each device and values
from the first worker.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

NEEDS = ("tensorflow.python.ops.resource_variable_ops:ResourceVariable",)
_OF_CLOCK = "_tfdist_of_clock"


def of(value: Any, name: str, dtype: tf.DType | None = None) -> tf.Variable:
    """Makes a variable with this value, on the current device; outside of graphs."""
    return resource_variable_ops.ResourceVariable(value, trainable=False, name=name, dtype=dtype)


def of_clock(value: Any, name: str) -> tf.Variable:
    """Makes a variable for times of steps: no part of a program, which may lose it."""
    variable = of(value, name)
    setattr(variable, _OF_CLOCK, True)
    return variable


def is_of_clock(variable: Any) -> bool:
    """Returns True for a variable of `of_clock`."""
    return vars(variable).get(_OF_CLOCK, False)
