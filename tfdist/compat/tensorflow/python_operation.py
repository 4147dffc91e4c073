# SPDX-License-Identifier: Apache-2.0
"""Calls Python from a graph, with short error messages.

An operation that calls Python passes on a few of Python's exceptions, and no exception of TensorFlow's. It surrounds
the message with the places where the operations were defined. Of all that, the user needs what the failing operation
said and where the model defines it; it comes first here.
"""

from __future__ import annotations

import functools
import pathlib
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.tensorflow.graphs import enclosing

_PACKAGE = str(pathlib.Path(__file__).resolve().parents[2])
# Code that is not the user's: this library, installed packages, and Python itself.
_FOREIGN = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", _PACKAGE)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in .*')
_ROOT_ERROR = re.compile(r"  \(\d+\) [A-Z_]+: +(?P<said>.*)")
# Lines about the operations and machines that have forwarded an error.
_WAY = re.compile(r"Graph execution error:|Detected at node |<stack traces unavailable>|\s*\[\[\{\{node |\s*$")


def call(function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list:
    """Leaves an operation in the graph that calls `function` with the values of `inputs`.

    Args:
      function: Called with eager tensors; the operation raises its exceptions, as far as operations can.
      inputs: Its arguments.
      dtypes: Those of its results.

    Returns:
      Its results, tensors of unknown shape.
    """
    results = tf.py_function(_translating(_kept_by_graphs(function)), inputs, dtypes, name="step_of_the_strategy")
    return results if isinstance(results, list) else []


def call_on_arrays(
    function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Leaves an operation in the graph that calls `function` with the arrays of `inputs`, which it must not change.

    Args:
      function: called with NumPy arrays.
      inputs: its arguments.
      dtypes: those of its results.

    Returns:
      Its results, tensors of unknown shape.
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


def told_briefly(message: str) -> str:
    """Shortens an error message to the failing operation's text, and the user's lines that define the operation.

    Args:
      message: TensorFlow's message, with all that the workers and the chief added; returned whole if not recognized.
    """
    message = message.partition("\nAdditional GRPC error information")[0]
    lines = message.splitlines()
    frames = dict.fromkeys(line for line in lines if (found := _FRAME.match(line)) and _is_own(found["file"]))
    roots = [found["said"] for line in lines if (found := _ROOT_ERROR.match(line))]
    said = roots[:1] or [line for line in lines if not (_FRAME.match(line) or _WAY.match(line))]
    return "\n".join([*(line.strip() for line in said), *frames]) if said else message


def _translating(function: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    @functools.wraps(function)
    def operation(*inputs: tf.Tensor) -> list[np.ndarray]:
        try:
            return function(*inputs)
        except tf.errors.OpError as error:
            translated = _translated(error)
        raise translated

    return operation


def _translated(error: tf.errors.OpError) -> Exception:
    """The exception that the operation will turn into one of the same type, where there is one."""
    if isinstance(error, tf.errors.OutOfRangeError):
        return StopIteration("End of sequence")
    said = told_briefly(error.message)
    kinds = {
        tf.errors.InvalidArgumentError: ValueError,
        tf.errors.ResourceExhaustedError: MemoryError,
        tf.errors.UnimplementedError: NotImplementedError,
    }
    kind = kinds.get(type(error))
    return kind(said) if kind else RuntimeError(f"{type(error).__name__}: {said}")


def _is_own(file: str) -> bool:
    return not any(part in file for part in _FOREIGN)
