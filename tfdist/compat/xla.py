# SPDX-License-Identifier: Apache-2.0
"""Tells whether a function is compiled with XLA.

There is no public way: a `tf.function` keeps its option `jit_compile` to itself, and Keras wraps the step of
`predict` in one when the model is compiled so.
"""

from __future__ import annotations

from typing import Any

NEEDS = ("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._jit_compile",)


def is_compiled(function: Any) -> bool:
    """Returns True if a function, or a function that it wraps, is compiled by XLA."""
    while function is not None:
        if getattr(function, "_jit_compile", None):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
