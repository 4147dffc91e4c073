# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a codec from step to step: on each worker, for each optimizer.

    gradients of this worker, weighed by its examples
        --> codec.exchange(gradients, state, transport) --> sums over the workers, the same on all
                                                        --> the new state, of this worker alone

The state is held in variables of this process, which no strategy mirrors. What is in it depends on the codec; most keep
of each gradient what they have not sent so far (error feedback).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import optimizer_patches, process_variable


class ErrorFeedback(tf.Module):
    """Sums gradients over workers by a codec.

    Args:
      codec: a `tfdist.compression.Codec`.
      transport: of the codec's messages (`tfdist.compression.Transport`), and of the state of one worker to all
        (`index`, `broadcast`); see `tfdist.transport.messages.Messages`.
    """

    def __init__(self, codec: Any, transport: Any) -> None:
        super().__init__(name="error_feedback")
        self._codec = codec
        self._transport = transport
        # By optimizer, and by the shapes of what it applies: two models may share an optimizer's class, not an object.
        self._states: weakref.WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()

    def sum(self, optimizer: Any, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over the workers; all call it with gradients of the same shapes, in the same order.

        Args:
          optimizer: the Keras optimizer that will apply the sums. While it scales the loss, the state is kept for
            gradients without scale, because the scale changes.
          gradients: dense gradients of static shapes.
        """
        if not gradients:
            return []
        specs = tuple(tf.TensorSpec(gradient.shape, gradient.dtype) for gradient in gradients)
        state = self._state_of(optimizer, specs)
        scale = _loss_scale(optimizer)
        unscaled = gradients if scale is None else [each / tf.cast(scale, each.dtype) for each in gradients]
        values = {name: variable.read_value() for name, variable in state.items()}
        sums, after = self._codec.exchange(unscaled, values, self._transport)
        for name, variable in state.items():
            variable.assign(after[name], read_value=False)
        return sums if scale is None else [each * tf.cast(scale, each.dtype) for each in sums]

    def sum_all(self, optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
        """Does the same where some gradients are None, which stays, or rows, which are sent as they are.

        In replica context.
        """
        dense = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
        sums = optimizer_patches.sum_over_replicas([None if i in dense else g for i, g in enumerate(gradients)])
        for index, total in zip(dense, self.sum(optimizer, [gradients[index] for index in dense]), strict=True):
            sums[index] = total
        return sums

    def collect(self, optimizers: Sequence[Any]) -> tuple[Any, list[np.ndarray]]:
        """Collects the state of all workers for a checkpoint; all workers call it at the same place.

        Args:
          optimizers: those whose state it is.

        Returns:
          A description (JSON data; None if the codec has no state, or nothing was sent yet), and the arrays of each
          worker after the other, on the first worker only.
        """
        states = self._states_of(optimizers)
        variables = _variables(states)
        if not variables:
            return None, []
        described = [
            [number, [[list(spec.shape), spec.dtype.name] for spec in specs], sorted(state)]
            for number, specs, state in states
        ]
        own, count = [variable.numpy() for variable in variables], self._transport.num_workers
        # From one worker at a time, so that the first one alone holds what all have.
        by_worker = [self._transport.broadcast(own, source) for source in range(count)]
        found = [each for arrays in by_worker for each in arrays]
        return {"workers": count, "states": described}, [] if self._transport.index else found

    def distribute(self, optimizers: Sequence[Any], described: Any, arrays: Sequence[np.ndarray]) -> bool:
        """Gives each worker its state from a checkpoint; all workers call it, and only the first one has arrays.

        If there are more or fewer workers than when the checkpoint was written, all get equal parts of what those had
        not sent, so that nothing of it is lost.

        Returns:
          False if the checkpoint is of another codec, or of other optimizers: the state is that of the beginning then.
        """
        for number, tensors, names in described["states"]:
            specs = tuple(tf.TensorSpec(shape, dtype) for shape, dtype in tensors)
            if number >= len(optimizers) or sorted(self._state_of(optimizers[number], specs)) != names:
                return False
        states = self._states_of(optimizers)
        variables = _variables(states)
        count, index = self._transport.num_workers, self._transport.index
        saved = [list(arrays[start : start + len(variables)]) for start in range(0, len(arrays), len(variables))]
        if not index and described["workers"] != count:
            names = [name for _, _, state in states for name in sorted(state)]
            saved = [self._shared(names, saved, count)] * count
        empty = [np.zeros(variable.shape, variable.dtype.as_numpy_dtype) for variable in variables]
        for target in range(count):
            given = self._transport.broadcast(empty if index else saved[target], 0)
            if target == index:
                for variable, array in zip(variables, given, strict=True):
                    variable.assign(array)
        return True

    def _shared(self, names: Sequence[str], saved: Sequence[Any], count: int) -> list[np.ndarray]:
        """Returns the state of each of `count` workers, made of that of other workers."""
        is_unsent = [name.split("/")[0] in self._codec.unsent for name in names]
        return [
            (np.sum(arrays, axis=0) / count).astype(arrays[0].dtype) if is_shared else arrays[0]
            for arrays, is_shared in zip(zip(*saved, strict=True), is_unsent, strict=True)
        ]

    def _states_of(self, optimizers: Sequence[Any]) -> list[tuple[int, Any, dict[str, Any]]]:
        """Returns the states for these optimizers, each with the number of its optimizer and its specs."""
        return [
            (number, specs, state)
            for number, optimizer in enumerate(optimizers)
            for specs, state in self._states.get(optimizer, {}).items()
        ]

    def _state_of(self, optimizer: Any, specs: tuple[tf.TensorSpec, ...]) -> dict[str, Any]:
        of_optimizer = self._states.setdefault(optimizer, {})
        if specs not in of_optimizer:
            with tf.init_scope():
                initial = self._codec.init(specs)
                of_optimizer[specs] = {name: process_variable.of(value, name) for name, value in initial.items()}
        return of_optimizer[specs]


def _variables(states: Sequence[tuple[int, Any, dict[str, Any]]]) -> list[Any]:
    return [state[name] for _, _, state in states for name in sorted(state)]


def _loss_scale(optimizer: Any) -> Any:
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return tf.convert_to_tensor(optimizer.dynamic_scale) if is_scaled else None
