# SPDX-License-Identifier: Apache-2.0
"""Wrappers of the variables of `ParameterServerStrategy`, and their registration with gradient tapes.

There is no public way: the strategy's variables are of two private classes, one of which stands before the variable on
the parameter server and the other for its shards. A subclass of the first is a variable to everything that goes by its
class. That an operation has read a variable, which gradients depend on, tapes hear from private functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import ps_values, sharded_variable
from tensorflow.python.eager import record, tape
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save_context

NEEDS = (
    "tensorflow.python.distribute.ps_values:AggregatingVariable._v",
    "tensorflow.python.distribute.ps_values:CachingVariable._dense_var_to_tensor",
    "tensorflow.python.distribute.ps_values:CachingVariable._gather_saveables_for_checkpoint",
    "tensorflow.python.distribute.ps_values:CachingVariable._v",
    "tensorflow.python.distribute.sharded_variable:ShardedVariable._saving_variable",
    "tensorflow.python.eager.record:record_operation",
    "tensorflow.python.eager.record:stop_recording",
    "tensorflow.python.eager.tape:variable_accessed",
    "tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._lazy_read",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._restore_from_tensors",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._serialize_to_tensors",
    "tensorflow.python.ops.resource_variable_ops:variable_accessed",
    "tensorflow.python.ops.resource_variable_ops:write_object_proto_for_resource_variable(enforce_naming)",
    "tensorflow.python.saved_model.save_context:in_save_context",
)

ShardedVariable = sharded_variable.ShardedVariable
without_recording = record.stop_recording


class ServerVariable(ps_values.CachingVariable):
    """A variable that stands before one on a parameter server.

    Args:
      variable: the one on the parameter server.
    """

    def __init__(self, variable: Any) -> None:
        super().__init__(variable)

    @property
    def stored(self) -> Any:
        """The variable on the parameter server."""
        return self._v

    def serialized(self) -> dict[str, Any]:
        """Returns the tensors that a checkpoint saves of the variable on the parameter server."""
        return self._v._serialize_to_tensors()

    def restored(self, tensors: dict[str, Any]) -> Any:
        """Restores the variable on the parameter server from a checkpoint's tensors."""
        return self._v._restore_from_tensors(tensors)

    def read_after(self, operation: Any) -> Any:
        """A value that is read, if anybody needs it, after an operation that writes."""
        return self._v._lazy_read(operation)


def is_single(variable: Any) -> bool:
    """Returns True for a variable that the strategy has placed, whole, on one parameter server."""
    return type(variable) is ps_values.CachingVariable


def exported(shards: Any) -> Any:
    """Returns the variable without a value, of the shape of all shards, that stands for them in a SavedModel."""
    return shards._saving_variable


def describe(variable: Any, name: str, proto: Any, options: Any) -> None:
    """Writes a variable's description in a SavedModel, where it has this name."""
    resource_variable_ops.write_object_proto_for_resource_variable(variable, proto, options, enforce_naming=False)
    proto.variable.name = name


def is_traced_for_export() -> bool:
    """Returns True in a function, or graph, that is written to a SavedModel."""
    return save_context.in_save_context() and not tf.executing_eagerly()


def record_read(variable: Any, copy: tf.Tensor) -> None:
    """Says that `copy` is what a `tf.Variable` was read as, in the graph that is traced.

    TensorFlow does so for a read: gradient tapes watch the variable, and lead from what was read to it; forward
    accumulators do so by the handle within the graph.
    """
    resource_variable_ops.variable_accessed(variable)
    same: Callable[[Any], list[Any]] = lambda x: [x]  # noqa: E731
    for source in (variable.handle, tf.convert_to_tensor(variable.handle)):
        record.record_operation("ReadVariableOp", [copy], [source], backward_function=same, forward_function=same)


def watch(handle: tf.Tensor, is_trainable: bool) -> None:
    """Makes gradient tapes watch a tensor as they watch the handle of a variable that is read."""
    tape.variable_accessed(_Watched(handle, is_trainable))


def watch_variable(variable: Any) -> None:
    """Makes gradient tapes watch a trainable variable, and list it among their watched variables."""
    tape.variable_accessed(variable)


def is_written_by(handle: tf.Tensor, operation: tf.Operation) -> bool:
    """Returns True if an operation, or a function that it calls, writes the variable with this handle."""
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return handle in written


class _Watched:
    """Stands for a variable where a gradient tape is told that it was read."""

    def __init__(self, handle: tf.Tensor, trainable: bool) -> None:
        self.handle = handle
        self.trainable = trainable
