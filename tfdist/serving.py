# SPDX-License-Identifier: Apache-2.0
"""What a `worker` or `ps` process runs, and the embedded cluster of local processes.

A serving process has no program of its own: the chief's closures run in it. It ends when the chief is done (exit code
0), or when the chief has vanished (exit code 75, which launchers restart). The chief says that it is done by having
TensorFlow write a file *on the serving machine*, through the connection it has anyway, so that no second port is
needed.

`python -m tfdist.serving` serves the task in TF_CONFIG; it is what the embedded cluster starts.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import pathlib
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster import Cluster, Task
from tfdist.engines import rendezvous
from tfdist.launchers.ports import PortReservation
from tfdist.launchers.processes import Process, Supervisor

# EX_TEMPFAIL of sysexits.h: "try again later". Launchers restart a task that ends with it.
CHIEF_LOST_EXIT_CODE = 75
# The environment variable in which workers find the dispatcher of the tf.data service, "host:port".
DATA_SERVICE_VARIABLE = "TFDIST_DATA_SERVICE"

_POLL_SECS = 0.5
_CHIEF_LOST_SECS = 10.0
# Not `tempfile.gettempdir()`: TMPDIR need not be the same on the chief, and both have to come to the same path.
_MARKS = pathlib.Path("/tmp")


# In a worker or ps process.


def serve(cluster: Cluster, start_timeout_secs: float = 300.0) -> int:
    """Serves this process' task until the chief is done.

    Args:
      cluster: The cluster, with the task of this process.
      start_timeout_secs: How long to wait for the chief to come up.

    Returns:
      The exit code: 0 when the chief is done, 75 when it has vanished, 1 when it never came.
    """
    mark = _done_mark(cluster, cluster.task)
    if cluster.chief is not None and cluster.chief.type == "chief":
        _prepare(mark)
    jobs = {job: dict(tasks) for job, tasks in cluster.jobs.items()}
    server = tf.distribute.Server(
        tf.train.ClusterSpec(jobs),
        job_name=cluster.task.type,
        task_index=cluster.task.index,
        protocol="grpc",
        start=True,
    )
    _start_data_worker(cluster)
    try:
        return _await_chief(cluster, mark, start_timeout_secs)
    finally:
        shutil.rmtree(mark.parent, ignore_errors=True)
        del server


def _await_chief(cluster: Cluster, mark: pathlib.Path, start_timeout_secs: float) -> int:
    chief = cluster.jobs.get("chief", {}).get(0)
    if chief is None:
        # An embedded cluster: the guard of this process ends it.
        threading.Event().wait()
        return 0
    seen = False
    waiting_since = last_seen = time.monotonic()
    while not mark.exists():
        now = time.monotonic()
        if _answers(chief):
            seen, last_seen = True, now
        elif seen and now - last_seen > _CHIEF_LOST_SECS:
            _say(
                f"{cluster.task}: the chief at {chief} has been gone for {_CHIEF_LOST_SECS:.0f} s; "
                f"ending with code {CHIEF_LOST_EXIT_CODE}"
            )
            return CHIEF_LOST_EXIT_CODE
        elif not seen and now - waiting_since > start_timeout_secs:
            _say(
                f"{cluster.task}: the chief at {chief} did not come up within start_timeout_secs={start_timeout_secs:g}"
            )
            return 1
        time.sleep(_POLL_SECS)
    return 0


def _answers(address: str) -> bool:
    try:
        socket.create_connection(rendezvous.split_address(address), timeout=_POLL_SECS).close()
    except OSError:
        return False
    return True


def _start_data_worker(cluster: Cluster) -> None:
    """Lets this worker prepare data for all, where the cluster has a tf.data service."""
    dispatcher = os.environ.get(DATA_SERVICE_VARIABLE)
    if not dispatcher or cluster.task.type != "worker":
        return
    host = cluster.address().rpartition(":")[0]
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher, worker_address=f"{host}:%port%", port=0
    )
    server = tf.data.experimental.service.WorkerServer(config, start=False)
    # It waits for the dispatcher, which only a chief that uses it starts; the thread keeps the server alive.
    threading.Thread(
        target=lambda: (server.start(), server.join()), name="tfdist data service worker", daemon=True
    ).start()


def _done_mark(cluster: Cluster, task: Task) -> pathlib.Path:
    identity = f"{sorted((job, sorted(tasks.items())) for job, tasks in cluster.jobs.items())} {task}"
    return _MARKS / f"tfdist-{hashlib.sha256(identity.encode()).hexdigest()[:24]}" / "done"


def _prepare(mark: pathlib.Path) -> None:
    """Makes a fresh directory that only this user can write to."""
    shutil.rmtree(mark.parent, ignore_errors=True)
    mark.parent.mkdir(mode=0o700)


def _say(message: str) -> None:
    print(  # noqa: T201 - this process' own messages
        f"tfdist: {message}", file=sys.stderr, flush=True
    )


# On the chief.


class Attachment:
    """The chief's hold on its cluster.

    Args:
      cluster: All tasks; `chief` may be missing, then its address is chosen by TensorFlow.
      embedded: The local processes behind it, if they were started here.
      data_service: "host:port" for the dispatcher of the tf.data service, if one may be started.
    """

    def __init__(self, cluster: Cluster, embedded: EmbeddedCluster | None, data_service: str | None):
        self.cluster = cluster
        self.embedded = embedded
        self._data_service = data_service
        self._dispatcher: tf.data.experimental.service.DispatchServer | None = None

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.cluster.num_workers

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster in the stock strategy's terms."""
        jobs = {job: list(tasks.values()) for job, tasks in self.cluster.jobs.items() if job != "evaluator"}
        return _resolver(jobs, "chief" if "chief" in jobs else None)

    def renamed_resolver(self, coordinator_name: str) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The same, with the chief's job called `coordinator_name`."""
        jobs = {job: list(tasks.values()) for job, tasks in self.cluster.jobs.items() if job != "evaluator"}
        if "chief" in jobs:
            jobs[coordinator_name] = jobs.pop("chief")
        return _resolver(jobs, None)

    def data_service_address(self) -> str:
        """Starts the dispatcher of the tf.data service, once, and returns "grpc://host:port"."""
        if self._data_service is None:
            raise ValueError(
                'data_sharding="dynamic" needs a tf.data service. Set the environment variable '
                f'{DATA_SERVICE_VARIABLE}="host:port", the chief\'s host and a free port there, to the '
                'same value in every task, or use data_sharding="shard".'
            )
        if self._dispatcher is None:
            service = tf.data.experimental.service
            config = service.DispatcherConfig(port=int(self._data_service.rpartition(":")[2]))
            self._dispatcher = service.DispatchServer(config)
        return f"grpc://{self._data_service}"

    def finish(self) -> None:
        """Tells every task that the chief is done. Called at exit, unless the program failed."""
        if self.embedded is not None or getattr(sys, "last_value", None) is not None:
            return
        for task in self.cluster.tasks:
            if task.type in ("worker", "ps"):
                # A task that is gone by now needs no word.
                with (
                    contextlib.suppress(tf.errors.OpError),
                    tf.device(f"/job:{task.type}/task:{task.index}/device:CPU:0"),
                ):
                    tf.io.write_file(str(_done_mark(self.cluster, task)), "done")


def attach(
    cluster: Cluster | None, num_workers: int, num_ps: int, start_timeout_secs: float, uses_data_service: bool = False
) -> Attachment:
    """Waits for the tasks of `cluster`, or starts a cluster of local processes where there is none.

    Args:
      cluster: The cluster, or None.
      num_workers: Workers to start where there is none.
      num_ps: Parameter servers to start where there is none.
      start_timeout_secs: How long to wait for the tasks.
      uses_data_service: Starts the dispatcher of a tf.data service, before the workers look for it.

    Raises:
      ValueError: A number of processes to start is out of range.
      TimeoutError: A task did not come up.
    """
    embedded, data_service = None, os.environ.get(DATA_SERVICE_VARIABLE)
    if cluster is None:
        embedded = EmbeddedCluster(num_workers, num_ps)
        cluster, data_service = embedded.cluster, embedded.data_service
    attachment = Attachment(cluster, embedded, data_service)
    if uses_data_service:
        attachment.data_service_address()
    servers = [task for task in cluster.tasks if task.type in ("worker", "ps")]
    rendezvous.reach(cluster, servers, start_timeout_secs, check=embedded.check if embedded else lambda: None)
    if embedded is not None:
        embedded.keep_alive()
    atexit.register(attachment.finish)
    return attachment


def cluster_of(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Cluster:
    """The cluster that a resolver describes. Without a task type this process is the chief."""
    jobs = {job: dict(enumerate(tasks)) for job, tasks in resolver.cluster_spec().as_dict().items()}
    return Cluster(jobs, Task(resolver.task_type or "chief", resolver.task_id or 0))


def _resolver(jobs: dict[str, list[str]], task_type: str | None) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=task_type, task_id=0 if task_type else None, rpc_layer="grpc"
    )


class EmbeddedCluster:
    """Worker and ps processes on this machine, which end with this program, whatever ends it.

    A worker that dies is started again; a ps can't be, because the variables died with it.

    Args:
      num_workers: How many workers, at least 1.
      num_ps: How many parameter servers, at least 1.
    """

    def __init__(self, num_workers: int, num_ps: int):
        for name, value in (("num_workers", num_workers), ("num_ps", num_ps)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1. Received: {name}={value!r}")
        self._ports = PortReservation(num_workers + num_ps + 1)
        addresses = [f"127.0.0.1:{port}" for port in self._ports.ports]
        workers, servers = addresses[:num_workers], addresses[num_workers:-1]
        jobs = {"worker": dict(enumerate(workers)), "ps": dict(enumerate(servers))}
        self.cluster = Cluster(jobs, Task("worker", 0))
        self.data_service = addresses[-1]
        self._supervisor = Supervisor()
        self._processes = {str(task): self._start(task) for task in self.cluster.tasks}

    def keep_alive(self) -> None:
        """From now on, workers that end are started again."""
        threading.Thread(target=self._watch, name="tfdist embedded cluster", daemon=True).start()

    def check(self) -> None:
        """Raises RuntimeError if a process has ended before it ever served."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} of the embedded cluster ended with code {process.poll()}: {_tail(process)}")

    def _start(self, task: Task) -> Process:
        env = dict(
            os.environ, TF_CONFIG=self.cluster.with_task(task).to_tf_config(), TFDIST_DATA_SERVICE=self.data_service
        )
        root = str(pathlib.Path(__file__).resolve().parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        if task.type == "ps":
            env["CUDA_VISIBLE_DEVICES"] = ""
        return self._supervisor.start(str(task), [sys.executable, "-m", "tfdist.serving"], env)

    def _watch(self) -> None:
        while process := self._supervisor.wait_first_exit():
            process.wait()
            again = process.name.startswith("worker")
            consequence = ", starting it again" if again else ""
            _say(f"{process.name} ended with code {process.returncode}{consequence}. {_tail(process)}".rstrip())
            if again:
                self._processes[process.name] = self._start(_task(process.name))


def _task(name: str) -> Task:
    job, _, index = name.partition(":")
    return Task(job, int(index))


def _tail(process: Process) -> str:
    return " | ".join(process.tail[-3:])


def main(served: Callable[[Cluster], int] = serve) -> int:
    """Serves the task in TF_CONFIG."""
    return served(Cluster.from_tf_config())


if __name__ == "__main__":
    sys.exit(main())
