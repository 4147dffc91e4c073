# SPDX-License-Identifier: Apache-2.0
"""Graphs and functions of TensorFlow: which are traced, their operations, AutoGraph, and Python that graphs call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import pathlib
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config

from tfdist.compat import patching

NEEDS = (
    "tensorflow.python.framework.ops:Operation._add_control_input, _set_device",
    "tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction.call_flat",
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction._inference_function",
    "tensorflow.python.autograph.core.config:CONVERSION_RULES, DoNotConvert",
)


def enclosing() -> Iterator[Any]:
    """Yields the graph that is traced, and those around it; nothing where TensorFlow runs eagerly."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


# Tells whether a traced operation is part of a loop or a conditional, or of a function given to a `tf.data.Dataset`.
#
# There is no public way: TensorFlow's public graphs don't say which construct they are the body of.


_DATASET = "Dataset_"


def in_branch_or_loop() -> bool:
    """Returns True while a part of a `tf.while_loop` or a branch of a `tf.cond` is traced."""
    return any(getattr(graph, "is_control_flow_graph", False) for graph in enclosing())


def in_dataset_function() -> bool:
    """Returns True while a function is traced that runs for each element of a data set, such as that of `map`."""
    return any(getattr(graph, "name", "").startswith(_DATASET) for graph in enclosing())


def captured_by(tensor: Any) -> tf.Tensor | None:
    """Returns the tensor of an outer graph that this tensor of a function's graph stands for; None if for none."""
    is_argument = tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder"
    captures = getattr(tensor.graph, "captures", ()) if is_argument else ()
    return next((outer for outer, inner in captures if inner is tensor), None)


# Edits operations of a graph that is being traced: their inputs, their devices and what they wait for.
#
# There is no public way to change an operation that exists: TensorFlow's public graphs grow only. An edit stays with
# the graph, which belongs to the step that is traced, so there is nothing to restore.


def wait_for_operation(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes an operation begin after another one has ended."""
    operation._add_control_input(other)


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


# Calls Python from a graph, with short error messages.
#
# An operation that calls Python passes on a few of Python's exceptions, and no exception of TensorFlow's. It surrounds
# the message with the places where the operations were defined. Of all that, the user needs what the failing operation
# said and where the model defines it; it comes first here.


_PACKAGE = str(pathlib.Path(__file__).resolve().parents[2])
# Code that is not the user's: this library, installed packages, and Python itself.
_FOREIGN = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", _PACKAGE)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in .*')
_ROOT_ERROR = re.compile(r"  \(\d+\) [A-Z_]+: +(?P<said>.*)")
# Lines about the operations and machines that have forwarded an error.
_WAY = re.compile(r"Graph execution error:|Detected at node |<stack traces unavailable>|\s*\[\[\{\{node |\s*$")


def call_on_arrays(
    function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Leaves an operation in the graph that calls `function` with the arrays of `inputs`, which it must not change.

    Returns:
      Its results, tensors of these dtypes and of unknown shape.
    """
    return list(tf.numpy_function(_kept_by_graphs(function), inputs, dtypes))


def _kept_by_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of an operation, which lives as long as a graph that is traced now.

    TensorFlow never frees the Python functions of operations, nor what these refer to, such as a model.
    """
    # The last one has no graph around it and lives for ever.
    graphs = [*enclosing()][:-1]
    if not graphs:
        return function
    # Not the outermost one alone: a function that is traced within it may be called by others later.
    for graph in graphs:
        patching.setdefault(graph, "_tfdist_functions", list).append(function)
    kept: Any = weakref.ref(function)
    return lambda *given: kept()(*given)


def brief(error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error of the same type, with the message of `told_briefly`."""
    return type(error)(None, None, told_briefly(error.message))


@contextlib.contextmanager
def told_in_brief() -> Iterator[None]:
    """Raises errors of operations as `brief` has them; the end of data as it is."""
    try:
        yield
    except tf.errors.OutOfRangeError:
        raise
    except tf.errors.OpError as error:
        raise brief(error) from None


def told_briefly(message: str) -> str:
    """Shortens an error message to the failing operation's text, and the user's lines that define the operation.

    Args:
      message: TensorFlow's message, with all that the workers and the chief added; returned whole if not recognized.
    """
    message = message.partition("\nAdditional GRPC error information")[0]
    lines = message.splitlines()
    of_files = [(line, found["file"]) for line in lines if (found := _FRAME.match(line))]
    frames = dict.fromkeys(line for line, file in of_files if not any(part in file for part in _FOREIGN))
    roots = [found["said"] for line in lines if (found := _ROOT_ERROR.match(line))]
    said = roots[:1] or [line for line in lines if not (_FRAME.match(line) or _WAY.match(line))]
    return "\n".join([*(line.strip() for line in said), *frames]) if said else message


_READING = re.compile("ReadVariableOp|ResourceGather|VariableShape")


def written_in(graph: Any) -> list[tf.Variable]:
    """Returns the variables from outside of a function's graph that it may write: all but those that are only read."""
    variables = {id(getattr(each, "handle", None)): each for each in graph.variables}
    return [
        variables[id(outside)]
        for outside, inside in graph.captures
        if id(outside) in variables and not all(_READING.match(each.type) for each in inside.consumers())
    ]


def types_in(*graphs: tf.Graph) -> set[str]:
    """Returns the types of the operations in graphs and in the functions that they call."""
    described = [graph.as_graph_def() for graph in graphs]
    bodies = [body for each in described for body in (each.node, *(inner.node_def for inner in each.library.function))]
    return {node.op for body in bodies for node in body}


def operations_behind(operation: tf.Operation, sources: Collection[tf.Operation] = ()) -> set[tf.Operation]:
    """Returns an operation of a graph and those that its inputs are computed by, except what is behind `sources`."""
    waiting, found = [operation], {operation}
    while waiting:
        inputs = {tensor.op for tensor in waiting.pop().inputs} - found - {*sources}
        waiting += inputs
        found |= inputs
    return found
