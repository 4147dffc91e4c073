# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation where each worker updates by itself: K gradients of one worker make one update.

Keras' own accumulators would be on the parameter servers, where workers add to each other's. Here each worker has its
own. A step is traced twice: once to add its gradients to the worker's sums, once to update with their mean,

    (sum of K - 1 gradients + this one) / K,

and to set the sums to zero. Which of them runs is decided by the number of gradients that the worker has added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import optimizers, placement
from tfdist.compat.tensorflow import replicas
from tfdist.compat.tensorflow.coordinator import create_on_workers


class GradientSums:
    """One worker's sums of gradients; a worker that was lost begins with new ones.

    Args:
      kinds: shape, dtype and device of each, as of the variables that are trained; "" for the worker's first device.
    """

    def __init__(self, kinds: Sequence[tuple[tf.TensorShape, tf.DType, str]]):
        self._variables = []
        for shape, dtype, device in kinds:
            with replicas.on_device(device):
                self._variables.append(tf.Variable(tf.zeros(shape, dtype), trainable=False))
        # The resources by which a step reaches them.
        self.handles = [variable.handle for variable in self._variables]
        # Number of gradients that were added since the last update.
        self.count = 0

    def clear(self) -> None:
        """Begins anew, after an error within several steps: nobody knows which of them have added their gradients."""
        for variable in self._variables:
            variable.assign(tf.zeros_like(variable))
        self.count = 0


class Accumulation:
    """The sums of all workers for one optimizer.

    Args:
      coordinator: the coordinator of the workers.
      optimizer: a built Keras optimizer.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, optimizer: Any):
        self._optimizer = optimizer
        self._variables = optimizers.trained_by(optimizer)
        # Of `GradientSums.handles`.
        self.specs = [tf.TensorSpec([], tf.resource)] * len(self._variables)
        self.num_steps = int(optimizer.gradient_accumulation_steps)
        with coordinator.strategy.scope():
            self._devices = [placement.reader_of(variable, "") for variable in self._variables]
        pairs = zip(self._variables, self._devices, strict=True)
        kinds = [(tf.TensorShape(each.shape), tf.as_dtype(each.dtype), device) for each, device in pairs]
        self.on_workers = create_on_workers(coordinator, lambda: GradientSums(kinds))

    @contextlib.contextmanager
    def traced(self, handles: Sequence[tf.Tensor], updates: bool) -> Iterator[None]:
        """Within this block, `apply` of the optimizer adds to the sums, or updates with their mean."""
        optimizer, calls = self._optimizer, []
        apply = optimizer.apply

        def instead(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            if calls:
                raise ValueError(
                    "gradient_accumulation_steps under asynchronous ParameterServerStrategy takes one optimizer.apply "
                    "in each step; add the gradients up first. Received: a second call in one step, "
                    f"gradient_accumulation_steps={self.num_steps}"
                )
            calls.append(True)
            variables = list(self._variables if trainable_variables is None else trainable_variables)
            pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
            indices = [optimizers.index_of(optimizer, variable) for _, variable in pairs]
            means = []
            for index, (grad, _) in zip(indices, pairs, strict=True):
                with replicas.on_device(self._devices[index]):
                    gradient = tf.convert_to_tensor(grad)
                    if updates:
                        means.append(self._mean(handles[index], gradient))
                    else:
                        tf.raw_ops.AssignAddVariableOp(resource=handles[index], value=gradient)
            if updates:
                optimizers.apply_accumulated(optimizer, apply, means, [variable for _, variable in pairs])

        with optimizers.patched_attributes([(optimizer, "apply", instead)]):
            yield

    def _mean(self, place: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        total = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=place, dtype=gradient.dtype), gradient.shape)
        with tf.control_dependencies([total]):
            tf.raw_ops.AssignVariableOp(resource=place, value=tf.zeros_like(gradient))
        return (total + gradient) / self.num_steps
