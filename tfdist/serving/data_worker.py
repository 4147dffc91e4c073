# SPDX-License-Identifier: Apache-2.0
"""A tf.data service worker beside each worker of a cluster, which prepares endless data for `data_sharding="dynamic"`.

It runs in a process of its own, because TensorFlow's `WorkerServer.start` holds Python's lock until the dispatcher has
registered the worker, without a timeout. A slow, silent or killed dispatcher would block all Python code in the
training worker's process: its signal handlers, and the thread that watches the chief.

`python -m tfdist.serving.data_worker DISPATCHER HOST` runs a data worker. Importing this module imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from tfdist import _log, _machine
from tfdist.cluster import Cluster, data_service_address
from tfdist.compat.tensorflow import servers
from tfdist.coordination import rendezvous
from tfdist.launchers.supervise import processes
from tfdist.launchers.supervise.processes import Process, Supervisor

_POLL_SECS = 0.5
_MOST_PAUSE_SECS = 60.0
# SIGTERM ends a data worker at once, even while its Python is blocked, because it installs no handler.
_GRACE_SECS = 1.0
# A data worker that ran for at least this time resets the count of failures.
_STABLE_SECS = 10.0


@contextlib.contextmanager
def run_data_worker(cluster: Cluster) -> Iterator[None]:
    """Runs a data worker within this block, if this task is a worker whose environment names a dispatcher.

    Raises:
      ClusterError: the environment has an invalid address.
    """
    dispatcher = data_service_address()
    if dispatcher is None or cluster.task.type != "worker":
        yield
        return
    host, _, _ = cluster.address().rpartition(":")
    supervisor = _RestartingWorker(str(cluster.task), dispatcher, host)
    threading.Thread(target=supervisor.run, name="tfdist data worker", daemon=True).start()
    try:
        yield
    finally:
        supervisor.stop()


class _RestartingWorker:
    """Starts the data worker once the dispatcher accepts connections, and restarts it when it ends.

    The chief starts a dispatcher only for `data_sharding="dynamic"`; most jobs never start a data worker.
    """

    def __init__(self, task: str, dispatcher: str, host: str) -> None:
        self._task = task
        self._dispatcher = dispatcher
        self._command = processes.module_command("tfdist.serving.data_worker", dispatcher, host)
        self._supervisor = Supervisor()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Starts and restarts the data worker until `stop`."""
        failures = 0
        while not self._stopped.wait(_pause_secs(failures)):
            if not rendezvous.answers(self._dispatcher, _POLL_SECS):
                continue
            try:
                child = self._start()
            except OSError as error:
                failures += 1
                _log.say(f"the data worker of {self._task} can't be started: {error}")
                continue
            if child is None:
                return
            code = child.wait()
            failures = failures + 1 if child.ran_secs < _STABLE_SECS else 1
            if not self._stopped.is_set():
                tail = " | ".join(child.tail[-3:])
                _log.say(f"the data worker of {self._task} ended with code {code}. {tail}".rstrip())

    def stop(self) -> None:
        """Ends the data worker, and starts no other."""
        with self._lock:
            self._stopped.set()
        self._supervisor.stop(grace_secs=_GRACE_SECS)

    def _start(self) -> Process | None:
        with self._lock:
            if self._stopped.is_set():
                return None
            # No GPU: tf.data runs on CPUs, and a second process on a GPU would take memory from training.
            return self._supervisor.start("data worker", self._command, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def _pause_secs(failures: int) -> float:
    """Returns the pause before the next attempt to reach the dispatcher (exponential backoff)."""
    return min(_MOST_PAUSE_SECS, _POLL_SECS * 2**failures)


def main(dispatcher: str, host: str) -> None:
    """Runs a data worker in this process until a signal ends it."""
    _machine.keep_freed_memory(few_arenas=True)
    servers.skip_package_init()
    servers.run_data_worker(dispatcher, host)


if __name__ == "__main__":
    main(*sys.argv[1:])
