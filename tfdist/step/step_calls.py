# SPDX-License-Identifier: Apache-2.0
"""Calls an engine's Python function for each batch: by an operation of Keras' graph, or directly outside of graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.tensorflow import python_operation
from tfdist.passes import handle as handles
from tfdist.step import keras_steps


class StepCalls:
    """Traces steps, and calls a Python function with the traced step for each batch.

    Args:
      trace: traces a model's bound `train_step` for batches like the batch of a handle; its result has the attribute
        `dtypes`, of the results of `make`.
      make: makes the next step, from the result of `trace` and a pass over the data. A bound method: neither this
        object nor a graph keeps its owner alive.
    """

    def __init__(
        self, trace: Callable[[Callable[..., Any], handles.BatchHandle], Any], make: Callable[[Any, Any], list[Any]]
    ) -> None:
        self._trace = weakref.WeakMethod(trace)
        self._make = weakref.WeakMethod(make)
        # The last step of a custom loop outside of graphs.
        self._traced: dict[Any, Any] = {}

    def run(self, step: Callable[..., Any], handle: handles.BatchHandle) -> tuple[Any, list[Any]]:
        """Returns the results of `trace`, and of `make` for the batch of this handle."""
        if tf.executing_eagerly():
            traced = self._outside_of_a_graph(step, handle)
            return traced, self._of(self._make)(traced, handles.registry.find(handle.content))
        traced = self._of(self._trace)(step, handle)
        # TensorFlow never frees Python functions of operations, so they must not hold the model; the graph holds it.
        patching.setdefault(tf.compat.v1.get_default_graph(), "_tfdist_steps", list).append(traced)
        make_of: Any = self._make
        traced_of: Any = weakref.ref(traced)

        def call(number: tf.Tensor) -> list[Any]:
            return make_of()(traced_of(), handles.registry.find(number))

        return traced, python_operation.call(call, [handle.content], traced.dtypes)

    def _outside_of_a_graph(self, step: Any, handle: handles.BatchHandle) -> Any:
        kept, key = keras_steps.traced_with(step), (step, handle.kind.number)
        if kept is None:
            kept = self._traced
            for other in kept.keys() - {key}:
                del kept[other]
        if key not in kept:
            kept[key] = self._of(self._trace)(step, handle)
        return kept[key]

    def _of(self, method: Any) -> Any:
        return method()
