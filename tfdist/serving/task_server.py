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

# TensorFlow's own variable for the number of threads of an operation.
_THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"


def start(cluster: Cluster) -> Any:
    """Starts the server of this process' task; it lives as long as it is held, and then some."""
    task = cluster.task
    return bare_servers.start(cluster.jobs, task.type, task.index, _threads(cluster), _Codecs(str(task)))


class _Codecs:
    """Answers requests for codecs; imports them with the first one, because most clusters need none.

    Args:
      task: name of this process, such as "worker:0".
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._server: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """See `on_servers.Server`."""
        with self._lock:
            if self._server is None:
                from tfdist.compression import on_servers

                self._server = on_servers.Server(self._task)
        return self._server(*arguments)


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
