# SPDX-License-Identifier: Apache-2.0
"""A tf.data service worker beside each worker of a cluster: it prepares endless data under `data_sharding="dynamic"`.

It is a process of its own, because TensorFlow's `WorkerServer.start` holds Python's lock until the dispatcher has
registered the worker, without a time limit. A dispatcher that is slow, silent or killed would stop all of Python in
the process of the training worker: its signal handlers, and the thread that watches the chief.

`python -m tfdist.data_worker DISPATCHER HOST` runs one. This module imports no TensorFlow before that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from tfdist.cluster import Cluster, data_service_address
from tfdist.engines import heap, rendezvous, task_server, watch
from tfdist.launchers import interpreter
from tfdist.launchers.processes import Process, Supervisor

_POLL_SECS = 0.5
_MOST_PAUSE_SECS = 60.0
# SIGTERM ends a data worker at once, even while Python is stopped in it: it has no handler.
_GRACE_SECS = 1.0
# A data worker that ran for that long counts as one that worked.
_SETTLED_SECS = 10.0


@contextlib.contextmanager
def beside(cluster: Cluster) -> Iterator[None]:
    """Runs a data worker within this block, for a task `worker` whose environment names a dispatcher.

    Raises:
      ClusterError: the environment names no address.
    """
    dispatcher = data_service_address()
    if dispatcher is None or cluster.task.type != "worker":
        yield
        return
    host, _, _ = cluster.address().rpartition(":")
    keeper = _Keeper(str(cluster.task), dispatcher, host)
    threading.Thread(target=keeper.keep, name="tfdist data worker", daemon=True).start()
    try:
        yield
    finally:
        keeper.stop()


class _Keeper:
    """Starts the data worker once the dispatcher accepts connections, and again when it ends.

    Only a chief that deals out batches starts a dispatcher, so that most jobs never get a data worker.
    """

    def __init__(self, task: str, dispatcher: str, host: str) -> None:
        self._task = task
        self._dispatcher = dispatcher
        self._command = interpreter.module_command("tfdist.data_worker", dispatcher, host)
        self._supervisor = Supervisor()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def keep(self) -> None:
        """Returns after `stop`."""
        failures = 0
        while not self._stopped.wait(_pause_secs(failures)):
            if not rendezvous.answers(self._dispatcher, _POLL_SECS):
                continue
            child = self._start()
            if child is None:
                return
            code = child.wait()
            failures = failures + 1 if child.ran_secs < _SETTLED_SECS else 1
            if not self._stopped.is_set():
                tail = " | ".join(child.tail[-3:])
                watch.say(f"tfdist: the data worker of {self._task} ended with code {code}. {tail}".rstrip())

    def stop(self) -> None:
        """Ends the data worker; none is started afterwards."""
        with self._lock:
            self._stopped.set()
        self._supervisor.stop(grace_secs=_GRACE_SECS)

    def _start(self) -> Process | None:
        with self._lock:
            if self._stopped.is_set():
                return None
            # Data are prepared on CPUs: a second process on a GPU would take memory from training.
            return self._supervisor.start("data worker", self._command, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def _pause_secs(failures: int) -> float:
    """How long to wait before the dispatcher is looked for again."""
    return min(_MOST_PAUSE_SECS, _POLL_SECS * 2**failures)


def main(dispatcher: str, host: str) -> None:
    """Runs a data worker in this process until a signal ends it."""
    heap.keep_freed_memory(few_arenas=True)
    task_server.go_without_front_door()
    task_server.run_data_worker(dispatcher, host)


if __name__ == "__main__":
    main(*sys.argv[1:])
