# SPDX-License-Identifier: Apache-2.0
"""The chief's connection to the cluster's servers, and the embedded cluster of local processes.

The servers themselves are in `task.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import threading

import tensorflow as tf

from tfdist import _checks, _forks, _log
from tfdist.cluster import NOTICES_VARIABLE, Cluster, Task
from tfdist.compat.tensorflow.servers import note_op_libraries, op_libraries
from tfdist.coordination import keepalive, rendezvous, stalls
from tfdist.launchers.requests import Restarts
from tfdist.launchers.supervise import processes
from tfdist.launchers.supervise.notices import GIVEN_UP, Reader, check_none_ended
from tfdist.launchers.supervise.processes import PortReservation, Process, Supervisor
from tfdist.launchers.supervise.replacements import Replacements
from tfdist.serving.task import LIBRARIES_VARIABLE, VARIABLE, done_mark, serve

__all__ = ["Attachment", "EmbeddedCluster", "attach", "check_sizes", "cluster_of", "serve"]

# A server process starts within a few seconds.
_RESTARTS = Restarts(settled_secs=10.0)
_JOIN_SECS = 5.0


class Attachment:
    """The chief's connection to the servers of its cluster.

    Args:
      cluster: all tasks. Without a task `chief`, TensorFlow chooses the chief's address.
      embedded: the embedded cluster, if its processes were started here; else None.
    """

    def __init__(self, cluster: Cluster, embedded: EmbeddedCluster | None):
        self.cluster = cluster
        self.embedded = embedded
        # Computed now, because the program may remove the job's secret from its environment. Only tasks of a listed
        # chief look for the mark; servers that the program has started itself don't.
        servers = [task for task in cluster.tasks if task.type in ("worker", "ps")] if cluster.is_listed else []
        self._marks = {task: done_mark(cluster, task) for task in servers}
        self._watched: keepalive.Keepalive | None = None
        # True if this program ends early and will be started again.
        self.is_abandoned = False

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Returns the cluster as a resolver for the stock strategy."""
        task_type, task_id = ("chief", 0) if "chief" in self.cluster.jobs else (None, None)
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            self.cluster_spec("chief"), task_type=task_type, task_id=task_id, rpc_layer="grpc"
        )

    def cluster_spec(self, chief_job: str) -> tf.train.ClusterSpec:
        """Returns the cluster in TensorFlow's form, with this name for the chief's job; without evaluators."""
        jobs = {job: list(tasks.values()) for job, tasks in self.cluster.jobs.items() if job != "evaluator"}
        return tf.train.ClusterSpec({chief_job if job == "chief" else job: tasks for job, tasks in jobs.items()})

    def watch(self) -> None:
        """Restarts the workers of an embedded cluster that end; probes the connections to the tasks of another."""
        if self.embedded is not None:
            self.embedded.keep_alive()
        else:
            notices = Reader(os.environ.get(NOTICES_VARIABLE))
            self._watched = keepalive.watch(self.cluster, functools.partial(_given_up, notices))

    def close(self) -> None:
        """Ends an embedded cluster, and the threads of `watch`. May be called again."""
        _forks.not_at_exit(self.finish)
        if self._watched is not None:
            self._watched.stop()
        if self.embedded is not None:
            self.embedded.close()

    def finish(self) -> None:
        """Notifies every server that the chief is done, unless the program failed. Called at exit."""
        if self.embedded is not None:
            self.embedded.end_watch()
        if self.embedded is not None or self.is_abandoned or _forks.has_failed():
            return
        for task, mark in self._marks.items():
            device = tf.device(f"/job:{task.type}/task:{task.index}/device:CPU:0")
            # A task that has ended already needs no notification.
            with contextlib.suppress(tf.errors.OpError), device:
                tf.io.write_file(str(mark), "done")


def attach(
    cluster: Cluster | None, num_workers: int, num_ps: int, start_timeout_secs: float, num_cpus: int = 1
) -> Attachment:
    """Waits for the tasks of `cluster`, or starts an embedded cluster of local processes.

    Args:
      cluster: the cluster; None to start an embedded one.
      num_workers: number of workers of an embedded cluster.
      num_ps: number of parameter servers of an embedded cluster.
      start_timeout_secs: how long to wait for the tasks.
      num_cpus: number of logical CPUs of each worker of an embedded cluster.

    Raises:
      ValueError: a number of processes is out of range.
      RuntimeError: a task of the cluster has ended.
      TimeoutError: a task did not start in time.
    """
    note_op_libraries()
    embedded = None
    if cluster is None:
        embedded = EmbeddedCluster(num_workers, num_ps, num_cpus)
        cluster = embedded.cluster
    attachment = Attachment(cluster, embedded)
    try:
        servers = [task for task in cluster.tasks if task.type in ("worker", "ps")]
        # The chief of an embedded cluster is no task of it, because it has no address.
        check = embedded.check if embedded else check_none_ended(set(map(str, servers)))
        rendezvous.reach(cluster, servers, start_timeout_secs, check, "chief" if embedded else str(cluster.task))
        attachment.watch()
    except BaseException:
        attachment.close()
        raise
    _forks.at_exit(attachment.finish)
    return attachment


def _given_up(notices: Reader) -> list[str]:
    """Returns the workers that the launcher has given up since the last call."""
    found = [line.removeprefix(GIVEN_UP) for line in notices.new_lines() if line.startswith(GIVEN_UP)]
    for task in found:
        _log.say(f"the launcher has given up {task}; going on without it")
    return found


def cluster_of(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Cluster:
    """Returns the cluster that a resolver describes. Without a task type this process is the chief."""
    jobs = {job: dict(enumerate(tasks)) for job, tasks in resolver.cluster_spec().as_dict().items()}
    return Cluster(jobs, Task(resolver.task_type or "chief", resolver.task_id or 0))


def check_sizes(num_workers: int, num_ps: int) -> None:
    """Raises ValueError unless both are integers of at least 1."""
    for name, value in (("num_workers", num_workers), ("num_ps", num_ps)):
        if not _checks.is_count(value, at_least=1):
            raise ValueError(f"{name} must be an integer of at least 1. Received: {name}={value!r}")


class EmbeddedCluster:
    """Worker and ps processes on this machine. They end with this program, also when it is killed.

    A worker that dies is restarted, up to a number of failures in a row (`Replacements`). A ps is not restarted,
    because its variables are lost.

    Args:
      num_workers: number of workers, at least 1.
      num_ps: number of parameter servers, at least 1.
      num_cpus: number of logical CPUs of each worker.

    Attributes:
      cluster: the processes as tasks, without a chief.
    """

    def __init__(self, num_workers: int, num_ps: int, num_cpus: int = 1):
        check_sizes(num_workers, num_ps)
        self._num_cpus = num_cpus
        self._ports = PortReservation(num_workers + num_ps)
        addresses = [f"127.0.0.1:{port}" for port in self._ports.ports]
        workers, servers = addresses[:num_workers], addresses[num_workers:]
        jobs = {"worker": dict(enumerate(workers)), "ps": dict(enumerate(servers))}
        self.cluster = Cluster(jobs, Task("worker", 0))
        self._supervisor = Supervisor()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        try:
            self._processes = {str(task): self._start(task) for task in self.cluster.tasks}
        except BaseException:
            self.close()
            raise

    def keep_alive(self) -> None:
        """Starts a thread that restarts workers that end."""
        self._thread = threading.Thread(target=self._watch, name="tfdist embedded cluster", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all processes; may be called again."""
        self.end_watch()
        self._supervisor.stop()
        self._ports.release()

    def end_watch(self) -> None:
        """Ends the thread of `keep_alive` once it has logged each process that ended; may be called again."""
        if self._thread is None:
            return
        for process in self._processes.values():
            if _has_ended(process.pid):
                # The guard's report may be on its way.
                process.wait(_JOIN_SECS)
        self._is_closing = True
        self._supervisor.wake()
        # The thread may be starting a process; a fork and an exec take less.
        self._thread.join(_JOIN_SECS)

    def check(self) -> None:
        """Raises RuntimeError if a process has ended. Called while the cluster starts."""
        for name, process in self._processes.items():
            if process.returncode is not None:
                raise RuntimeError(
                    f"{name} of the embedded cluster ended with code {process.returncode}: {_tail(process)}"
                )

    def pid(self, task: str) -> int | None:
        """Returns the process id of a task such as "worker:1", which is its process group, too; None if not running.

        Raises:
          KeyError: there is no such task.
        """
        process = self._processes[task]
        return process.pid if process.returncode is None else None

    def _start(self, task: Task) -> Process:
        env = dict(os.environ, TF_CONFIG=self.cluster.with_task(task).to_tf_config())
        env[VARIABLE] = str(self._num_cpus if task.type == "worker" else 1)
        env[LIBRARIES_VARIABLE] = os.pathsep.join(op_libraries())
        if task.type == "ps":
            env["CUDA_VISIBLE_DEVICES"] = ""
        return self._supervisor.start(str(task), processes.module_command("tfdist.serving.task"), env)

    def _watch(self) -> None:
        replacements = Replacements(_RESTARTS)
        while True:
            ended = self._supervisor.wait_first_exit(replacements.wait_secs())
            # `close` ends no process before this thread has: a process that has ended by now was lost.
            is_closing = self._is_closing
            if is_closing and not ended:
                return
            next_start = _register_failure(replacements, ended) if ended and not is_closing else ""
            # Restarts come before the line is written, because training may wait for the worker.
            for name in () if is_closing else replacements.due():
                job, _, index = name.partition(":")
                try:
                    self._processes[name] = self._start(Task(job, int(index)))
                except OSError as error:
                    replacements.failed(name, 0.0, least_secs=_RESTARTS.restart_backoff_secs)
                    _log.say(f"{name} of the embedded cluster could not be started: {error}")
            if ended:
                ended.wait()
                line = f"{ended.name} ended with code {ended.returncode}{next_start}. {_tail(ended)}"
                _log.say(line.rstrip())


def _register_failure(replacements: Replacements, ended: Process) -> str:
    """Counts the failure of a worker, and returns when it is started again, as the end of a sentence."""
    if not ended.name.startswith("worker"):
        return ""
    failures, secs = replacements.failed(ended.name, ended.ran_secs)
    if secs is None:
        return f"; it is given up after {failures} failures in a row"
    return f", starting it again in {secs:g} s" if secs else ", starting it again"


def _has_ended(pid: int | None) -> bool:
    """Returns True if a process is gone, or dead and not reaped yet. False on systems without /proc."""
    try:
        return stalls.run_state(pathlib.Path(f"/proc/{pid}")) in "ZX"
    except OSError:
        return pathlib.Path("/proc/self/stat").exists()


def _tail(process: Process) -> str:
    return " | ".join(process.tail[-3:])
