# SPDX-License-Identifier: Apache-2.0
"""Traces a step into a graph that is thrown away, for the variables that it makes.

There is no public way: TensorFlow's public graphs of functions belong to a `tf.function`, which keeps the variables
made in it for itself, and Keras makes the variables that it deferred in a `keras.StatelessScope` outside of any scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state, variables

from tfdist.compat import symbolic_build

NEEDS = (
    "keras.src.backend.common.global_state:get_global_attribute",
    "keras.src.backend.common.variables:initialize_all_variables",
)

_DEFERRED = "uninitialized_variables"


def trace(make: Callable[[], contextlib.AbstractContextManager], function: Callable[..., Any], specs: Any) -> Any:
    """Calls `function` with placeholders in a graph of its own, and makes the variables that it asks for.

    Args:
      make: gives the context in which variables are made.
      function: called with one argument for each of `specs`; nothing of what it does is run.
      specs: a tuple of structures of `tf.TypeSpec`s, tensors of the calling graph, and anything else.

    Returns:
      (variables made, error): how many, and the exception that `function` raised, or None.
    """
    made = 0

    def lifted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        with tf.init_scope(), make():
            return next_creator(**kwargs)

    error, count = None, _num_deferred()
    try:
        with (
            symbolic_build.name_scopes_closed(),
            tf.__internal__.FuncGraph("tfdist_scratch").as_default(),
            tf.variable_creator_scope(lifted),
            symbolic_build.Unwritten(collect_losses=True, initialize_variables=False),
        ):
            function(*tf.nest.map_structure(_placeholder, specs))
    except Exception as raised:
        error = raised
    made += _num_deferred() - count
    with tf.init_scope(), make():
        variables.initialize_all_variables()
    return made, error


def _num_deferred() -> int:
    return len(global_state.get_global_attribute(_DEFERRED) or [])


def _placeholder(spec: Any) -> Any:
    if not isinstance(spec, tf.TypeSpec):
        return spec
    parts = [
        tf.compat.v1.placeholder(part.dtype, part.shape) if isinstance(part, tf.TensorSpec) else part
        for part in tf.nest.flatten(spec, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
