# SPDX-License-Identifier: Apache-2.0
"""Calls a concrete function without the checks of its arguments, which cost a good part of a small step.

There is no public way: the public call of a concrete function goes through its type and its gradients each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

NEEDS = (
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction.call_flat",
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction._inference_function",
)


def bare(concrete: Any) -> Callable[..., Sequence[tf.Tensor]]:
    """Returns a callable equivalent of a concrete function of flat tensors, with less overhead."""
    function, captured = concrete._inference_function, list(concrete.captured_inputs)

    def call(*flat: tf.Tensor) -> Sequence[tf.Tensor]:
        return function.call_flat(*flat, *captured)

    # Captured tensors live as long as the graph.
    call.graph = concrete.graph
    return call
