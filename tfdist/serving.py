# SPDX-License-Identifier: Apache-2.0
"""The chief's hold on its cluster, and the embedded cluster of local processes.

What the other tasks of the cluster do meanwhile is in `serving_task.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from tfdist.cluster import DATA_SERVICE_VARIABLE, NOTICES_VARIABLE, Cluster, Task, data_service_address
from tfdist.engines import keepalive, rendezvous, watch
from tfdist.engines.data_service import DataService
from tfdist.launchers import interpreter
from tfdist.launchers.notices import GIVEN_UP, Reader
from tfdist.launchers.ports import PortReservation
from tfdist.launchers.processes import Process, Supervisor
from tfdist.launchers.replacements import Replacements
from tfdist.launchers.requests import Restarts
from tfdist.serving_task import done_mark, serve

__all__ = ["Attachment", "EmbeddedCluster", "attach", "check_sizes", "cluster_of", "serve"]

# A serving process is up within a few seconds.
_RESTARTS = Restarts(settled_secs=10.0)
# Between two looks at what the launcher has to say.
_NOTICE_SECS = 1.0


class Attachment:
    """The chief's hold on its cluster.

    Args:
      cluster: All tasks; `chief` may be missing, then its address is chosen by TensorFlow.
      embedded: The local processes behind it, if they were started here.
      data_service: "host:port" where the workers look for the dispatcher of a tf.data service, if they do.
    """

    def __init__(self, cluster: Cluster, embedded: EmbeddedCluster | None, data_service: str | None):
        self.cluster = cluster
        self.embedded = embedded
        chief = cluster.jobs.get("chief", {}).get(0, "127.0.0.1:0")
        self._data_service = DataService(chief.rpartition(":")[0], data_service)
        # Found now: the program may take the job's secret out of its environment.
        # Those who serve as tasks of a job know its chief; servers that the program has made itself look for no mark.
        servers = [task for task in cluster.tasks if task.type in ("worker", "ps")] if cluster.is_listed else []
        self._marks = {task: done_mark(cluster, task) for task in servers}
        # Whether this program ends before it is done, to be started again.
        self.is_abandoned = False

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

    def prepare_data_service(self) -> None:
        """Starts what the workers look for (`DataService.prepare`)."""
        self._data_service.prepare()

    def data_service_address(self, endless: bool) -> str:
        """See `DataService.address`."""
        return self._data_service.address(endless)

    def finish(self) -> None:
        """Tells every task that the chief is done. Called at exit, unless the program failed."""
        if self.embedded is not None or self.is_abandoned or getattr(sys, "last_value", None) is not None:
            return
        for task, mark in self._marks.items():
            device = tf.device(f"/job:{task.type}/task:{task.index}/device:CPU:0")
            # A task that is gone by now needs no word.
            with contextlib.suppress(tf.errors.OpError), device:
                tf.io.write_file(str(mark), "done")


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
    embedded, data_service = None, data_service_address()
    if cluster is None:
        embedded = EmbeddedCluster(num_workers, num_ps, uses_data_service)
        cluster, data_service = embedded.cluster, embedded.data_service
    attachment = Attachment(cluster, embedded, data_service)
    if uses_data_service:
        attachment.prepare_data_service()
    servers = [task for task in cluster.tasks if task.type in ("worker", "ps")]
    # The chief of an embedded cluster is no task of it: it has no address of its own.
    waiting: dict[str, Any] = {"check": embedded.check, "name": "chief"} if embedded else {}
    rendezvous.reach(cluster, servers, start_timeout_secs, **waiting)
    if embedded is not None:
        embedded.keep_alive()
    else:
        _heed_launcher(keepalive.watch(cluster))
    atexit.register(attachment.finish)
    return attachment


def _heed_launcher(watched: keepalive.Keepalive) -> None:
    """Ends the connections to each worker that the launcher has given up, so that nothing waits for it any more."""
    path = os.environ.get(NOTICES_VARIABLE)
    if path:
        reader = Reader(path)
        threading.Thread(target=_follow_notices, args=(reader, watched), name="tfdist notices", daemon=True).start()


def _follow_notices(reader: Reader, watched: keepalive.Keepalive) -> None:
    while True:
        for line in reader.new_lines():
            if line.startswith(GIVEN_UP):
                task = line.removeprefix(GIVEN_UP)
                watch.say(f"tfdist: the launcher has given up {task}; going on without it")
                watched.end(task)
        time.sleep(_NOTICE_SECS)


def cluster_of(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Cluster:
    """The cluster that a resolver describes. Without a task type this process is the chief."""
    jobs = {job: dict(enumerate(tasks)) for job, tasks in resolver.cluster_spec().as_dict().items()}
    return Cluster(jobs, Task(resolver.task_type or "chief", resolver.task_id or 0))


def _resolver(jobs: dict[str, list[str]], task_type: str | None) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=task_type, task_id=0 if task_type else None, rpc_layer="grpc"
    )


def check_sizes(num_workers: int, num_ps: int) -> None:
    """Raises ValueError unless these are numbers of tasks to start."""
    for name, value in (("num_workers", num_workers), ("num_ps", num_ps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1. Received: {name}={value!r}")


class EmbeddedCluster:
    """Worker and ps processes on this machine, which end with this program, whatever ends it.

    A worker that dies is started again, until it fails again and again (`Replacements`); a ps can't be, because the
    variables died with it.

    Args:
      num_workers: How many workers, at least 1.
      num_ps: How many parameter servers, at least 1.
      uses_data_service: Whether the workers look for the dispatcher of a tf.data service.

    Attributes:
      cluster: Its tasks, without a chief.
      data_service: "host:port" where they look for the dispatcher, or None.
    """

    def __init__(self, num_workers: int, num_ps: int, uses_data_service: bool):
        check_sizes(num_workers, num_ps)
        self._ports = PortReservation(num_workers + num_ps + 1)
        addresses = [f"127.0.0.1:{port}" for port in self._ports.ports]
        workers, servers = addresses[:num_workers], addresses[num_workers:-1]
        jobs = {"worker": dict(enumerate(workers)), "ps": dict(enumerate(servers))}
        self.cluster = Cluster(jobs, Task("worker", 0))
        self.data_service = addresses[-1] if uses_data_service else None
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

    def pid(self, task: str) -> int | None:
        """Process id of a task such as "worker:1", also that of its process group; None while it does not run.

        Raises:
          KeyError: there is no such task.
        """
        process = self._processes[task]
        return process.pid if process.poll() is None else None

    def _start(self, task: Task) -> Process:
        env = dict(os.environ, TF_CONFIG=self.cluster.with_task(task).to_tf_config())
        env.pop(DATA_SERVICE_VARIABLE, None)
        if self.data_service is not None:
            env[DATA_SERVICE_VARIABLE] = self.data_service
        if task.type == "ps":
            env["CUDA_VISIBLE_DEVICES"] = ""
        return self._supervisor.start(str(task), interpreter.module_command("tfdist.serving_task"), env)

    def _watch(self) -> None:
        replacements = Replacements(_RESTARTS)
        while True:
            ended = self._supervisor.wait_first_exit(replacements.wait_secs())
            consequence = _consequence(replacements, ended) if ended else ""
            # Before anything is said: training may wait for it.
            for name in replacements.due():
                try:
                    self._processes[name] = self._start(_task(name))
                except OSError as error:
                    replacements.failed(name, 0.0, least_secs=_RESTARTS.backoff_secs)
                    watch.say(f"tfdist: {name} of the embedded cluster could not be started: {error}")
            if ended:
                ended.wait()
                line = f"tfdist: {ended.name} ended with code {ended.returncode}{consequence}. {_tail(ended)}"
                watch.say(line.rstrip())


def _consequence(replacements: Replacements, ended: Process) -> str:
    if not ended.name.startswith("worker"):
        return ""
    failures, secs = replacements.failed(ended.name, ended.ran_secs)
    if secs is None:
        return f"; it is given up after {failures} failures in a row"
    return f", starting it again in {secs:g} s" if secs else ", starting it again"


def _task(name: str) -> Task:
    job, _, index = name.partition(":")
    return Task(job, int(index))


def _tail(process: Process) -> str:
    return " | ".join(process.tail[-3:])
