# SPDX-License-Identifier: Apache-2.0
"""Starts TensorFlow's servers, in a process of their own without most of TensorFlow's Python.

`import tensorflow` takes some four seconds of a CPU, nearly all of them for Python that a server never runs; the
server itself, in C++, is there after half a second. A worker that was killed is back the sooner for it. This is the
one place that imports modules of TensorFlow past its front door; `tests/engines/test_task_server.py` fails when that
changes.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import site
import sys
import sysconfig
import types
from typing import Any

from tfdist import _addresses
from tfdist.cluster import Cluster
from tfdist.engines import cpus

# What has `import tensorflow` load libraries into the process: a server needs them, too.
_LOADING_VARIABLES = ("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TF_USE_MODULAR_FILESYSTEM")
_LOADING_FOLDERS = ("tensorflow-plugins", "tensorflow/core/kernels")
_KINDS = ("purelib", "platlib")
# Where TensorFlow itself looks for the number of threads that an operation gets.
_THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"


def go_without_front_door() -> bool:
    """From now on `import tensorflow` gives this process an empty package, of which modules can be imported.

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
    return True


class _FrontDoor(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this process only serves: it has imported no tensorflow.{name}")


def _loads_libraries() -> bool:
    folders = {*sys.path, *site.getsitepackages(), site.getusersitepackages()}
    folders |= {sysconfig.get_path(kind, scheme) for scheme in sysconfig.get_scheme_names() for kind in _KINDS}
    found = any((pathlib.Path(folder) / name).exists() for folder in folders for name in _LOADING_FOLDERS)
    return found or any(os.environ.get(variable) for variable in _LOADING_VARIABLES)


def start(cluster: Cluster) -> Any:
    """Starts the server of this process' task; it lives as long as it is held, and then some."""
    from tensorflow.python import tf2
    from tensorflow.python.training import server_lib

    tf2.enable()
    jobs = {job: dict(tasks) for job, tasks in cluster.jobs.items()}
    return server_lib.Server(
        server_lib.ClusterSpec(jobs),
        job_name=cluster.task.type,
        task_index=cluster.task.index,
        protocol="grpc",
        start=True,
        config=_config(cluster),
    )


def threads_per_operation(cluster: Cluster, num_cpus: int) -> int:
    """How many threads an operation of this process' task gets: the workers of one host share its CPUs.

    With a thread per CPU each, as TensorFlow has it, workers of one host wait for each other's threads. Shares are
    rounded up, and tasks of other jobs, which wait most of the time, take nothing off.

    Args:
      cluster: with this process' task.
      num_cpus: of this host.
    """
    host, _ = _addresses.key(cluster.address())
    workers = [each for each in cluster.jobs.get("worker", {}).values() if _addresses.key(each)[0] == host]
    return -(-num_cpus // max(1, len(workers)))


def _config(cluster: Cluster) -> Any:
    from tensorflow.core.protobuf import config_pb2

    config = config_pb2.ConfigProto()
    count = os.cpu_count() or 1
    # Who has bound this process to some of the CPUs has divided them already.
    is_bound = cpus.usable() < count
    if not is_bound and not os.environ.get(_THREADS_VARIABLE):
        config.intra_op_parallelism_threads = threads_per_operation(cluster, count)
    return config


def run_data_worker(dispatcher: str, host: str) -> None:
    """Runs a tf.data service worker in this process for ever; Python stands still until it is registered.

    Args:
      dispatcher: "host:port" of the dispatcher.
      host: name of this machine, under which the others fetch batches.
    """
    from tensorflow.python.data.experimental.service import server_lib

    config = server_lib.WorkerConfig(dispatcher_address=dispatcher, worker_address=f"{host}:%port%", port=0)
    server = server_lib.WorkerServer(config, start=False)
    server.start()
    server.join()
