# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's servers: a process that serves without most of TensorFlow's Python, and Python functions that run in it.

`tf.numpy_function` looks its function up in the process that runs the operation, by a token that the process of the
trace has made up. In another process there is no such token, and there is no public way to register one. Here each
server process registers one function under a fixed token, and operations are made with this token.

A server process that has not imported `tensorflow.python.ops.script_ops` gets a registry of its own. The registration
holds as long as the process lives. Importing this module imports no TensorFlow.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

NEEDS = (
    "tensorflow.python.lib.core._pywrap_py_func:initialize_py_trampoline",
    "tensorflow.python.ops.script_ops:FuncRegistry._funcs",
    "tensorflow.python.ops.script_ops:_py_funcs",
    "tensorflow.core.protobuf.config_pb2:ConfigProto",
    "tensorflow.python.training.server_lib:Server",
)


TOKEN = "tfdist_server_function"
_REGISTRY = "tensorflow.python.ops.script_ops"

_registered: Callable[..., list[np.ndarray]] | None = None


def register_function(function: Callable[..., list[np.ndarray]]) -> None:
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

    _pywrap_py_func.initialize_py_trampoline(_called)


def call_function(inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Makes an operation that calls the function of the server on which it runs; in a graph or eagerly.

    Args:
      inputs: arguments of the function.
      dtypes: of its results.

    Returns:
      The results, of unknown shapes.

    Raises:
      tf.errors.InvalidArgumentError: when it runs on a server that has registered no function.
    """
    import tensorflow as tf

    return list(tf.raw_ops.PyFunc(input=list(inputs), token=TOKEN, Tout=list(dtypes)))


def _called(token: str, device: Any, arguments: Sequence[Any]) -> list[np.ndarray]:
    del device
    if token != TOKEN or _registered is None:
        raise ValueError(f"this process only serves: it has no Python function {token}")
    return _registered(*arguments)


# Starts TensorFlow's servers in a process that imports hardly any of TensorFlow's Python.
#
# `import tensorflow` takes some four seconds of a CPU, nearly all of them for Python that a server never runs. The
# server itself, in C++, is there after half a second. A worker that was killed is back the sooner for it. There is no
# public way past TensorFlow's front door: the public names of the servers are behind it. Such a process does nothing
# else, so the front door is not restored. `tests/serving/test_task_server.py` fails when TensorFlow changes any of it.


# Variables and folders by which `import tensorflow` loads libraries into the process: a server needs them, too.
_LOADING_VARIABLES = ("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TF_USE_MODULAR_FILESYSTEM")
_LOADING_FOLDERS = ("tensorflow-plugins", "tensorflow/core/kernels")
_KINDS = ("purelib", "platlib")


def skip_package_init() -> bool:
    """Replaces `tensorflow` in this process by an empty package, of which modules can be imported.

    Does nothing where TensorFlow was imported before, or where its import loads libraries.

    Returns:
      Whether it did.
    """
    spec = None if "tensorflow" in sys.modules else importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations or _loads_libraries():
        return False
    package = _FrontDoor("tensorflow")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["tensorflow"] = package
    # As the front door does.
    os.environ["TF2_BEHAVIOR"] = "1"
    return True


class _FrontDoor(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this process only serves: it has imported no tensorflow.{name}")


# Libraries of operations, such as those of tensorflow-text, that the program has loaded: a server needs them, too.


# First argument of the server's function; the second one is the paths, shape [n].
LOAD_REQUEST = b'{"method": "load"}'
# Libraries that the program had loaded when its servers started.
_loaded_before: set[str] = set()


def op_libraries() -> list[str]:
    """Returns the paths of the libraries of operations that this process has loaded, without TensorFlow's own."""
    import tensorflow as tf

    own = os.path.realpath(tf.sysconfig.get_lib()) + os.sep
    mapped = [line.split(maxsplit=5) for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    paths = dict.fromkeys(fields[5] for fields in mapped if len(fields) == 6 and ".so" in fields[5])
    return [path for path in paths if not path.startswith(own) and _uses_tensorflow(path)]


@functools.cache
def _uses_tensorflow(path: str) -> bool:
    """Returns True if a shared library names TensorFlow's among those that it needs."""
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError:
        return False
    return b"libtensorflow_framework.so" in content or b"libtensorflow_cc.so" in content


def note_op_libraries() -> None:
    """Notes which libraries of operations the servers have loaded by themselves; see `load_late_libraries`."""
    _loaded_before.clear()
    _loaded_before.update(op_libraries())


def load_late_libraries() -> None:
    """Loads libraries that the program has loaded since its servers started; on the server of the current device.

    Raises:
      tf.errors.InvalidArgumentError: the server can't load one of them.
    """
    import tensorflow as tf

    late = [path for path in op_libraries() if path not in _loaded_before]
    if late:
        call_function([tf.constant(LOAD_REQUEST), tf.constant(late)], [tf.uint8])


def load_op_libraries(paths: Sequence[str]) -> None:
    """Loads libraries, of which the operations register themselves with TensorFlow's runtime in this process.

    Raises:
      OSError: one of them can't be loaded; the others are.
    """
    if paths:
        # The runtime must be there before them.
        importlib.import_module("tensorflow.python.training.server_lib")
    failed = []
    for path in paths:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            failed.append(str(error))
    if failed:
        raise OSError("; ".join(failed))


def _loads_libraries() -> bool:
    folders = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    folders |= {sysconfig.get_path(kind, scheme) for scheme in sysconfig.get_scheme_names() for kind in _KINDS}
    found = any((pathlib.Path(folder) / name).exists() for folder in folders for name in _LOADING_FOLDERS)
    return found or any(os.environ.get(variable) for variable in _LOADING_VARIABLES)


def start_server(
    jobs: Mapping[str, Mapping[int, str]],
    job: str,
    index: int,
    threads_per_operation: int,
    function: Callable[..., Any],
    num_cpus: int = 1,
) -> Any:
    """Starts the server of a task; it lives as long as it is held, and then some.

    Args:
      jobs: for each job the addresses of its tasks, by their index.
      job: that of the task.
      index: that of the task.
      threads_per_operation: 0 for TensorFlow's own number.
      function: the Python function that operations of other processes call here; see `register_function`.
      num_cpus: number of logical CPUs.
    """
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.training import server_lib

    # After the imports, of which one may set up a registry, and before the first request.
    register_function(function)
    return server_lib.Server(
        {name: dict(tasks) for name, tasks in jobs.items()},
        job_name=job,
        task_index=index,
        protocol="grpc",
        start=True,
        config=config_pb2.ConfigProto(
            intra_op_parallelism_threads=threads_per_operation, device_count={"CPU": num_cpus}
        ),
    )
