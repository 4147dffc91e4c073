# SPDX-License-Identifier: Apache-2.0
"""Calls one Python function in a server process (`worker` or `ps`) from an operation that is placed on that server.

`tf.numpy_function` looks its function up in the process that runs the operation, by a token that the process of the
trace has made up. In another process there is no such token, and there is no public way to register one. Here each
server process registers one function under a fixed token, and operations are made with this token.

A server process that has not imported `tensorflow.python.ops.script_ops` (see `bare_servers`) gets a registry of its
own. The registration holds as long as the process lives. Importing this module imports no TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

NEEDS = (
    "tensorflow.python.lib.core._pywrap_py_func:initialize_py_trampoline",
    "tensorflow.python.ops.gen_script_ops:py_func",
    "tensorflow.python.ops.script_ops:FuncRegistry._funcs",
    "tensorflow.python.ops.script_ops:_py_funcs",
)

TOKEN = "tfdist_server_function"
_REGISTRY = "tensorflow.python.ops.script_ops"

_registered: Callable[..., list[np.ndarray]] | None = None


def register(function: Callable[..., list[np.ndarray]]) -> None:
    """Registers the function of this process; a later call replaces it.

    Args:
      function: called with the values of an operation's inputs as arrays (a scalar string as bytes), in any thread.
        Returns arrays. A ValueError becomes `tf.errors.InvalidArgumentError` at the caller.
    """
    global _registered
    # TensorFlow's registry has a weak reference only.
    _registered = function
    script_ops: Any = sys.modules.get(_REGISTRY)
    if script_ops is not None:
        script_ops._py_funcs._funcs[TOKEN] = function
        return
    from tensorflow.python.lib.core import _pywrap_py_func

    _pywrap_py_func.initialize_py_trampoline(_call)


def call(inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Makes an operation that calls the function of the server on which it runs; in a graph or eagerly.

    Args:
      inputs: arguments of the function.
      dtypes: of its results.

    Returns:
      The results, of unknown shapes.

    Raises:
      tf.errors.InvalidArgumentError: when it runs on a server that has registered no function.
    """
    from tensorflow.python.ops import gen_script_ops

    results: Any = gen_script_ops.py_func(list(inputs), TOKEN, list(dtypes))
    return list(results)


def _call(token: str, device: Any, arguments: Sequence[Any]) -> list[np.ndarray]:
    del device
    if token != TOKEN or _registered is None:
        raise ValueError(f"this process only serves: it has no Python function {token}")
    return _registered(*arguments)
