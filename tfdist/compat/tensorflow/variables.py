# SPDX-License-Identifier: Apache-2.0
"""Variables of TensorFlow: behind Keras' ones, of one process or step, on parameter servers, of several replicas."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import ps_values, values
from tensorflow.python.eager import record, tape
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save_context

NEEDS = (
    "keras:Variable._value",
    "tensorflow.python.distribute.values:DistributedVariable._distribute_strategy",
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable, variable_accessed",
    "tensorflow.python.ops.resource_variable_ops:write_object_proto_for_resource_variable(enforce_naming)",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._handle, _restore_from_tensors",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._serialize_to_tensors",
    "tensorflow.python.distribute.ps_values:CachingVariable._dense_var_to_tensor, _gather_saveables_for_checkpoint",
    "tensorflow.python.distribute.sharded_variable:ShardedVariable._saving_variable",
    "tensorflow.python.eager.record:stop_recording",
    "tensorflow.python.eager.tape:variable_accessed",
    "tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs",
    "tensorflow.python.saved_model.save_context:in_save_context",
    "tensorflow.python.distribute.values:DistributedVariable",
)


# All variables of TensorFlow but those of several copies.
ResourceVariable = resource_variable_ops.BaseResourceVariable


def tf_variable(variable: Any) -> Any:
    """The TensorFlow variable of a Keras variable, None if it is yet to be made; any other variable itself."""
    return getattr(variable, "_value", variable)


def with_tf_variable(variable: Any, value: Any) -> tuple[Any, str, Any]:
    """A change, for `optimizers.patched_attributes`, by which this is the variable behind a Keras variable."""
    return variable, "_value", value


def strategy_of(value: Any) -> Any:
    """The strategy in whose scope a TensorFlow variable was made, or None."""
    return getattr(value, "_distribute_strategy", None)


# A variable of this process alone.
#
# There is no public way: within a scope `tf.Variable` makes a variable of the strategy, with a copy on each device and
# values from the first worker.


_OF_CLOCK = "_tfdist_of_clock"


def variable_of_process(value: Any, name: str, dtype: tf.DType | None = None) -> tf.Variable:
    """Makes a variable with this value, on the current device; outside of graphs."""
    return resource_variable_ops.ResourceVariable(value, trainable=False, name=name, dtype=dtype)


def clock_variable(value: Any, name: str) -> tf.Variable:
    """Makes a variable for times of steps: no part of a program, which may lose it."""
    variable = variable_of_process(value, name)
    setattr(variable, _OF_CLOCK, True)
    return variable


def is_clock_variable(variable: Any) -> bool:
    """Returns True for a variable of `clock_variable`."""
    return vars(variable).get(_OF_CLOCK, False)


# A variable that belongs to one traced step.
#
# There is no public way: `tf.Variable` can't be made while a function is traced, unless it outlives the function.


class LocalVariable(ResourceVariable):
    """Variable on the default device of the graph that is traced; gets its value anew each time the graph runs.

    Args:
      value: the value that it begins with, a tensor of that graph.
      trainable: whether gradient tapes watch it.
    """

    def __init__(self, value: tf.Tensor, trainable: bool = False) -> None:
        name = f"tfdist_local_{uuid.uuid4().hex}"
        handle = tf.raw_ops.VarHandleOp(shape=value.shape, dtype=value.dtype, shared_name=name, name="local_variable")
        super().__init__(
            trainable=trainable,
            shape=value.shape,
            dtype=value.dtype,
            handle=handle,
            unique_id=name,
            handle_name=name,
            in_graph_mode=False,
        )
        made = self.assign(value, read_value=False)
        # The gradient of a loop asks for the shape of what the loop has read. It takes the handle from the loop's
        # results, of which TensorFlow does not know that it is the one that was assigned.
        with tf.control_dependencies([made]):
            self._handle = tf.identity(handle)

    def __deepcopy__(self, memo: Any) -> LocalVariable:
        raise NotImplementedError("a variable of one traced step has no copies")


# Wrappers of the variables of `ParameterServerStrategy`, and their registration with gradient tapes.
#
# There is no public way: the strategy's variables are of two private classes. One wraps the variable on the parameter
# server, the other its shards. A subclass of the first is a variable to everything that goes by its class. That an
# operation has read a variable, which gradients depend on, tapes hear from private functions only.


ShardedVariable = tf.__internal__.distribute.ShardedVariable
without_recording = record.stop_recording


class ServerVariable(ps_values.CachingVariable):
    """A variable that stands before one on a parameter server.

    Args:
      variable: the one on the parameter server.
    """

    @property
    def stored(self) -> Any:
        """The variable on the parameter server."""
        return self.get()

    def serialized(self) -> dict[str, Any]:
        """Returns the tensors that a checkpoint saves of the variable on the parameter server."""
        return self.stored._serialize_to_tensors()

    def restored(self, tensors: dict[str, Any]) -> Any:
        """Restores the variable on the parameter server from a checkpoint's tensors."""
        return self.stored._restore_from_tensors(tensors)


def is_single(variable: Any) -> bool:
    """Returns True for a variable that the strategy has placed, whole, on one parameter server."""
    return type(variable) is ps_values.CachingVariable


def exported_variable(shards: Any) -> Any:
    """Returns the variable without a value, of the shape of all shards, that stands for them in a SavedModel."""
    return shards._saving_variable


def describe_variable(variable: Any, name: str, proto: Any, options: Any) -> None:
    """Writes a variable's description in a SavedModel, where it has this name."""
    resource_variable_ops.write_object_proto_for_resource_variable(variable, proto, options, enforce_naming=False)
    proto.variable.name = name


def is_traced_for_export() -> bool:
    """Returns True in a function, or graph, that is written to a SavedModel."""
    return save_context.in_save_context() and not tf.executing_eagerly()


def record_read(variable: Any, copy: tf.Tensor) -> None:
    """Says that `copy` is what a `tf.Variable` was read as, in the graph that is traced.

    TensorFlow does so for a read. Gradient tapes watch the variable, and lead to it from the value; forward
    accumulators do so by the handle within the graph.
    """
    resource_variable_ops.variable_accessed(variable)
    for source in (variable.handle, tf.convert_to_tensor(variable.handle)):
        tf.__internal__.record_gradient("ReadVariableOp", [source], (), [copy])


def watch_handle(handle: tf.Tensor, is_trainable: bool) -> None:
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
    """Stand-in for a variable whose read a gradient tape records."""

    def __init__(self, handle: tf.Tensor, trainable: bool) -> None:
        self.handle = handle
        self.trainable = trainable

    def ref(self) -> Any:
        """Raises ValueError: a recomputed function has its gradients returned by variable."""
        raise ValueError(
            "tf.recompute_grad, and keras.remat, can't take gradients of a variable in shards; leave the layer that "
            "reads it out of what is computed again. Received: a function that reads one"
        )


# Gives variables of several replicas `int()`, `float()`, `complex()` and `np.array()`, as other variables have them.
#
# `int(optimizer.iterations)` raises a TypeError under stock strategies of several replicas, and `np.array` of a scalar
# variable a ValueError. The class of such variables has no public name.


_KINDS = {"__int__": int, "__float__": float, "__complex__": complex}


def define_numbers() -> None:
    """Adds the missing methods; they use the value of the variable outside of replicas."""
    for name, kind in _KINDS.items():
        if not hasattr(values.DistributedVariable, name):
            setattr(values.DistributedVariable, name, _reading(kind))
    if "__array__" not in vars(values.DistributedVariable):
        values.DistributedVariable.__array__ = _as_array


def _as_array(self: Any, dtype: Any = None, **options: Any) -> np.ndarray:
    # Called with `copy` by NumPy 2; what is read is a copy already.
    del options
    return np.asarray(self.read_value().numpy(), dtype)


def _reading(kind: type) -> Any:
    def read(self: Any) -> Any:
        return kind(self.read_value().numpy())

    return read


# Replaces how a strategy has slots of optimizers made beside the variables that they belong to.
#
# There is no public way: Keras calls `strategy.extended.colocate_vars_with` when an optimizer makes its slots, and a
# strategy can't be given another `extended`. The replacement lives and ends with the strategy.


Colocate = Callable[[Any], Any]


def replace_colocation(strategy: Any, wrap: Callable[[Colocate], Colocate]) -> None:
    """Replaces a strategy's `colocate_vars_with` by what `wrap` makes of it."""
    strategy.extended.colocate_vars_with = wrap(strategy.extended.colocate_vars_with)
