# SPDX-License-Identifier: Apache-2.0
"""Graphs and functions of TensorFlow: which are traced at the moment, their operations, and AutoGraph."""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.types import distribute

NEEDS = (
    "tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph",
    "tensorflow.python.ops.control_flow_v2_func_graphs:WhileCondFuncGraph",
    "tensorflow.python.framework.ops:Operation._add_control_input",
    "tensorflow.python.framework.ops:Operation._set_device",
    "tensorflow.python.framework.ops:Operation._update_input",
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction.call_flat",
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction._inference_function",
    "tensorflow.python.autograph.core.config:CONVERSION_RULES",
    "tensorflow.python.autograph.core.config:DoNotConvert",
    "tensorflow.python.types.distribute:Iterable",
    "tensorflow.python.types.distribute:Iterator",
)


def enclosing() -> Iterator[Any]:
    """Yields the graph that is traced, and those around it; nothing where TensorFlow runs eagerly."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


# Tells whether a traced operation is part of a loop, or of a conditional.
#
# There is no public way: TensorFlow's public graphs don't say which construct they are the body of.


_KINDS = (control_flow_v2_func_graphs.WhileBodyFuncGraph, control_flow_v2_func_graphs.WhileCondFuncGraph)


def in_loop() -> bool:
    """Returns True while the body or the condition of a `tf.while_loop` is traced."""
    return any(isinstance(graph, _KINDS) for graph in enclosing())


def in_branch_or_loop() -> bool:
    """Returns True while a part of a `tf.while_loop` or a branch of a `tf.cond` is traced."""
    return any(getattr(graph, "is_control_flow_graph", False) for graph in enclosing())


def captured_by(tensor: Any) -> tf.Tensor | None:
    """Returns the tensor of an outer graph that this tensor of a function's graph stands for; None if for none."""
    is_argument = tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder"
    captures = getattr(tensor.graph, "captures", ()) if is_argument else ()
    return next((outer for outer, inner in captures if inner is tensor), None)


# Tells whether a traced operation is part of a function given to a `tf.data.Dataset`, such as that of `map`.
#
# There is no public way: TensorFlow's public graphs don't say which construct they are the body of.


_PREFIX = "Dataset_"


def in_dataset_function() -> bool:
    """Returns True while a function is traced that runs for each element of a data set."""
    return any(getattr(graph, "name", "").startswith(_PREFIX) for graph in enclosing())


# Edits operations of a graph that is being traced: their inputs, their devices and what they wait for.
#
# There is no public way to change an operation that exists: TensorFlow's public graphs grow only. An edit stays with
# the graph, which belongs to the step that is traced, so there is nothing to restore.


def wait_for_operation(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes an operation begin after another one has ended."""
    operation._add_control_input(other)


def give_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives an operation this tensor as the input of this index."""
    operation._update_input(index, tensor)


def place_operation(operation: tf.Operation, device: str) -> None:
    """Places an operation on a device."""
    operation._set_device(device)


# Calls a function where no graph is traced and no scope or replica is entered.
#
# TensorFlow keeps all of these by thread, and has no public way out: `tf.init_scope` leads out of graphs, but not out
# of a replica, and it stops gradient tapes. What tfdist keeps in a `contextvars.ContextVar` holds in the called
# function, too.


_Result = TypeVar("_Result")


def call_outside(function: Callable[..., _Result], *args: object) -> _Result:
    """Returns, or raises, what `function(*args)` does in a thread of its own, which is waited for."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfdist call") as thread:
        return thread.submit(contextvars.copy_context().run, function, *args).result()


# Calls a concrete function without the checks of its arguments, which cost a good part of a small step.
#
# There is no public way: the public call of a concrete function goes through its type and its gradients each time.


def bare_call(concrete: Any) -> Callable[..., Sequence[tf.Tensor]]:
    """Returns a callable equivalent of a concrete function of flat tensors, with less overhead."""
    function, captured = concrete._inference_function, list(concrete.captured_inputs)

    def call(*flat: tf.Tensor) -> Sequence[tf.Tensor]:
        return function.call_flat(*flat, *captured)

    # Captured tensors live as long as the graph.
    call.graph = concrete.graph
    return call


# Excludes the functions of tfdist from AutoGraph, as those of TensorFlow and Keras are excluded.
#
# AutoGraph rewrites every Python function that is called while a `tf.function`, or a function of a `tf.data.Dataset`,
# is traced. Exempt are the libraries in a list of its own. To rewrite `strategy.run` and what that calls takes seconds.
# `tf.autograph.experimental.do_not_convert` is no public way out: within what it marks, a user's step would be left as
# it is, too.


_RULE = config.DoNotConvert("tfdist")


def leave_library() -> None:
    """Adds tfdist to the list, for good. Does nothing if it was called before."""
    if _RULE not in config.CONVERSION_RULES:
        config.CONVERSION_RULES = (*config.CONVERSION_RULES, _RULE)


def converted(function: Callable[..., Any], by_default: bool = False) -> Callable[..., Any]:
    """Returns a user's function as AutoGraph converts it where this is called; what tfdist calls is left as it is.

    Args:
      function: any function; one that is converted already is returned itself.
      by_default: whether it is converted outside of a `tf.function`, too.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=by_default)


# Base classes of objects whose iteration AutoGraph converts into a loop of the graph.
#
# There is no public way: `for x in iterator` in a `tf.function` becomes a loop in the graph for tensors, for tf.data's
# own classes, and for what is derived from these two. Keras hands each `tf.distribute.DistributedIterator`, the public
# class above them, into a function of its own as a whole.


LoopIterator = distribute.Iterator
LoopIterable = distribute.Iterable
