# SPDX-License-Identifier: Apache-2.0
"""Computes the gradient of an operation on the device of the operation, where a replica spans several devices.

`tf.GradientTape` computes all gradients on the device that is current where `gradient` is called, which would fetch the
weights of all parts to it. There is no public way: TensorFlow has one function that looks up the gradient of an
operation, and calls the last one that was registered. The replacement is permanent; it changes nothing for operations
that no strategy with replicas of several devices computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop

from tfdist.compat import replica_parts

NEEDS = (
    "tensorflow.python.pywrap_tfe:TFE_Py_RegisterGradientFunction",
    "tensorflow.python.eager.backprop:_gradient_function(op_name, attr_tuple, num_inputs, inputs, outputs, out_grads)",
)

_is_installed = False


def install() -> None:
    """Replaces the function, once in a process."""
    global _is_installed
    if _is_installed:
        return
    original: Any = backprop._gradient_function

    def gradient(
        op_name: str, attributes: Any, num_inputs: int, inputs: Any, outputs: Any, out_grads: Any, *rest: Any
    ) -> Any:
        device = _device([*(outputs or ()), *(inputs or ()), *(out_grads or ())])
        if device is None:
            return original(op_name, attributes, num_inputs, inputs, outputs, out_grads, *rest)
        with tf.device(device):
            return original(op_name, attributes, num_inputs, inputs, outputs, out_grads, *rest)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient)
    _is_installed = True


def _device(tensors: Iterable[Any]) -> str | None:
    """Returns the device of the first tensor that says so: TensorFlow keeps those that the gradient needs."""
    parts = replica_parts.of(tf.distribute.get_strategy())
    for tensor in tensors if parts else ():
        if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.resource and tensor.device:
            return tensor.device if parts.part_on(tensor.device) is not None else None
    return None
