# SPDX-License-Identifier: Apache-2.0
"""Finds the method of a model that is decorated with `tf.function`.

There is no public way: the instance is an attribute of a stand-in that TensorFlow binds the method to.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import tensorflow as tf


def undecorated(function: Any) -> Any:
    """The bound method itself if `function` is one that is decorated with `tf.function`; else `function`."""
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    method: Any = inspect.unwrap(function.python_function)
    target = getattr(getattr(method, "__self__", None), "target", None)
    return function if target is None else types.MethodType(method.__func__, target)
