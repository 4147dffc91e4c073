# SPDX-License-Identifier: Apache-2.0
"""Starts the server of a task, with a number of threads for its operations."""

from __future__ import annotations

import os
import threading
from typing import Any

from tfdist import _addresses
from tfdist.cluster import Cluster
from tfdist.compat import bare_servers
from tfdist.runtime import cpus
from tfdist.runtime.usage import USAGE_REQUEST, Sampler

# TensorFlow's own variable for the number of threads of an operation.
_THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"


def start(cluster: Cluster, num_cpus: int = 1) -> Any:
    """Starts the server of this process' task; it lives as long as it is held, and then some.

    Args:
      cluster: the cluster, with this process' task.
      num_cpus: number of logical CPUs of the server.
    """
    task = cluster.task
    # Its thread ends with the process, which does nothing else.
    functions = _Functions(str(task), Sampler(from_now=False).start())
    return bare_servers.start(cluster.jobs, task.type, task.index, _threads(cluster), functions, num_cpus)


class _Functions:
    """Answers requests for counters and codecs; imports codecs with the first one, because most clusters need none.

    Args:
      task: name of this process, such as "worker:0".
      sampler: counters of this process.
    """

    def __init__(self, task: str, sampler: Sampler) -> None:
        self._task = task
        self._sampler = sampler
        self._lock = threading.Lock()
        self._server: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """See `on_servers.Server`."""
        if arguments and _is_usage_request(arguments[0]):
            import numpy as np

            return [np.frombuffer(self._sampler.sample().to_json().encode(), np.uint8).copy()]
        with self._lock:
            if self._server is None:
                from tfdist.compression import on_servers

                self._server = on_servers.Server(self._task)
        return self._server(*arguments)


def _is_usage_request(given: Any) -> bool:
    # A scalar string comes as bytes, or in an array.
    return getattr(given, "size", 1) == 1 and (given.item() if hasattr(given, "item") else given) == USAGE_REQUEST


def threads_per_operation(cluster: Cluster, num_cpus: int) -> int:
    """Returns the number of threads per operation of this process' task: workers of one host share its CPUs.

    TensorFlow's default is one thread per CPU in each process, with which workers of one host wait for each other's
    threads. Shares are rounded up. Tasks of other jobs don't count, because they are idle most of the time.

    Args:
      cluster: the cluster, with this process' task.
      num_cpus: number of CPUs of this host.
    """
    host, _ = _addresses.key(cluster.address())
    workers = [each for each in cluster.jobs.get("worker", {}).values() if _addresses.key(each)[0] == host]
    return -(-num_cpus // max(1, len(workers)))


def _threads(cluster: Cluster) -> int:
    """Returns the number of threads of an operation; 0 leaves the choice to TensorFlow."""
    count = os.cpu_count() or 1
    # A process that is bound to some of the CPUs has its share already.
    is_bound = cpus.usable() < count
    return 0 if is_bound or os.environ.get(_THREADS_VARIABLE) else threads_per_operation(cluster, count)
