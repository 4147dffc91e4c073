# SPDX-License-Identifier: Apache-2.0
"""Cluster description: the tasks, their addresses and this process' task. Reads and writes TF_CONFIG. No TensorFlow.

    cluster = Cluster.from_environment()          # None when TF_CONFIG is not set
    cluster.check_multi_worker()
    if is_chief(): ...                            # of this process, with or without a cluster or a strategy

Any error in a description is raised as a `ClusterError` of one line, which names the place, the value and the remedy.
TensorFlow itself would hang, train alone, or truncate an index of 1.7 to 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist import _sockets

# Jobs in the order in which they are listed and started. `master` is the old name of `chief`.
JOBS = ("chief", "worker", "ps", "evaluator")
# The environment variable with the job's secret: a random text that a launcher passes to all tasks of a job.
JOB_SECRET_VARIABLE = "TFDIST_JOB_SECRET"
# The environment variable with the path of the launcher's notices for this task (`tfdist.launchers.supervise.notices`).
NOTICES_VARIABLE = "TFDIST_NOTICES"
# The environment variable with the path of the file by which tasks show the launcher that they have joined the cluster.
JOINED_VARIABLE = "TFDIST_JOINED"
_OLD_NAMES = {"master": "chief"}
_MAX_INDEX = 2**31 - 1
_UNSET = "unset TF_CONFIG to train on this machine alone"


def task() -> Task:
    """Returns the task of this process in TF_CONFIG or in the strategy's cluster; `worker:0` if it trains alone.

    Raises:
      ClusterError: TF_CONFIG is invalid.
    """
    cluster = _current()
    return cluster.task if cluster else Task("worker", 0)


def is_chief() -> bool:
    """Returns True in the process that should print and write your own files; True in a program that trains alone.

    That is the chief, or worker 0 of a cluster without one. It can be called before a strategy is built.

    Raises:
      ClusterError: TF_CONFIG is invalid.
    """
    cluster = _current()
    return cluster is None or cluster.is_chief


def num_workers() -> int:
    """Returns the number of workers that train together; 1 in a program that trains alone.

    The workers are those of TF_CONFIG, a chief that trains included, or those of the strategy's cluster. A
    `ParameterServerStrategy` without TF_CONFIG starts its workers when it is built. Devices of one process are not
    workers; `strategy.num_replicas_in_sync` counts them.

    Raises:
      ClusterError: TF_CONFIG is invalid.
    """
    cluster = _current()
    return len(cluster.workers) if cluster else 1


def worker_index() -> int:
    """Returns the index of this process among the workers that train together; 0 in a program that trains alone.

    The chief of parameter servers has 0: it is the only process that runs the script. A ps and an evaluator have their
    index within their job. Don't shard a data set by it: strategies divide each batch themselves.

    Raises:
      ClusterError: TF_CONFIG is invalid.
    """
    cluster = _current()
    if cluster is None:
        return 0
    return cluster.workers.index(cluster.task) if cluster.task in cluster.workers else cluster.task.index


def join(cluster: Cluster | None) -> None:
    """Makes `cluster`, which a strategy has joined, the answer of `task` and the like; None for TF_CONFIG again."""
    global _joined
    _joined = cluster


def note_joined() -> None:
    """Shows the launcher, if there is one that asks, that this task has built a strategy for the cluster."""
    path = os.environ.get(JOINED_VARIABLE)
    if path:
        with contextlib.suppress(OSError):
            pathlib.Path(path).touch()


class ClusterError(ValueError):
    """Invalid cluster description or TF_CONFIG. The message is one line."""


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster: `Task("worker", 1)`, written worker:1."""

    type: str
    index: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", _job_name(self.type, "task.type"))
        if type(self.index) is not int:
            raise _wrong("task.index", "is not an integer", "write a plain number, such as 1", self.index)
        if not 0 <= self.index <= _MAX_INDEX:
            raise _wrong("task.index", "is out of range", "indices start at 0", self.index)

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True, eq=True)
class Cluster:
    """All tasks with their addresses, and the task of this process.

    Args:
      jobs: addresses ("host:port") by job name: a list, or for a sparse cluster a dict from index to address, as in
        `tf.train.ClusterSpec`. Kept as read-only dicts from index to address; empty jobs are left out, `master`
        becomes `chief`.
      task: this process. An evaluator need not be listed in `jobs`, nor the chief of parameter servers.

    Raises:
      ClusterError: the description is invalid.
    """

    jobs: Mapping[str, Mapping[int, str]]
    task: Task

    def __post_init__(self) -> None:
        object.__setattr__(self, "jobs", _normal_jobs(self.jobs))
        _check_task(self.task, self.jobs)

    def __hash__(self) -> int:
        return hash(self.to_tf_config())

    def __reduce__(self) -> tuple[Any, ...]:
        return Cluster, ({job: dict(tasks) for job, tasks in self.jobs.items()}, self.task)

    @classmethod
    def from_tf_config(cls, text: str | None = None) -> Cluster:
        """Reads a TF_CONFIG value.

        Args:
          text: the JSON text; the environment variable TF_CONFIG by default. Keys besides `cluster` and `task`, such as
            `rpc_layer` and `environment`, are ignored.

        Raises:
          ClusterError: the text is no valid TF_CONFIG.
        """
        text = os.environ.get("TF_CONFIG") if text is None else text
        if text is None:
            raise ClusterError(f"TF_CONFIG is not set; {_EXAMPLE}. Received: nothing")
        try:
            return _from_config(_parse(text))
        except ClusterError as error:
            raise ClusterError(f"TF_CONFIG: {error}") from None

    @classmethod
    def from_environment(cls) -> Cluster | None:
        """Returns the cluster in the environment variable TF_CONFIG, or None if it is not set."""
        return cls.from_tf_config() if "TF_CONFIG" in os.environ else None

    def to_tf_config(self) -> str:
        """Returns the TF_CONFIG of this task: one line of JSON, dense jobs as lists and sparse ones as dicts."""
        jobs = {job: self._job_for_json(job) for job in self.jobs}
        return json.dumps({"cluster": jobs, "task": {"type": self.task.type, "index": self.task.index}})

    def with_task(self, task: Task) -> Cluster:
        """Returns the same cluster for another of its tasks."""
        _check_task(task, self.jobs)
        other = object.__new__(Cluster)  # Without a check of each address again, which takes minutes for 2000 tasks.
        vars(other).update(jobs=self.jobs, task=task)
        return other

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All listed tasks: chief, workers, parameter servers, evaluators, each job in the order of its indices."""
        return tuple(Task(job, index) for job, addresses in self.jobs.items() for index in addresses)

    @property
    def chief(self) -> Task | None:
        """The listed task that leads: the chief, or worker 0 where there is no chief, or None.

        Of a cluster with parameter servers no worker leads: its chief may have no address.
        """
        for leader in (Task("chief", 0), Task("worker", 0)):
            if leader.index in self.jobs.get(leader.type, {}):
                return leader if leader.type == "chief" or not self.num_ps else None
        return None

    @property
    def is_chief(self) -> bool:
        """True if this process leads: the chief, or worker 0 where there is no chief."""
        return self.task.type == "chief" or self.task == self.chief

    @property
    def is_listed(self) -> bool:
        """True if this process has an address in the cluster."""
        return self.task.index in self.jobs.get(self.task.type, {})

    @property
    def num_workers(self) -> int:
        """Number of tasks of the job `worker`, without the chief."""
        return len(self.jobs.get("worker", {}))

    @property
    def num_ps(self) -> int:
        """Number of tasks of the job `ps`."""
        return len(self.jobs.get("ps", {}))

    @property
    def training_tasks(self) -> tuple[Task, ...]:
        """The tasks that train under MultiWorkerMirroredStrategy: the chief, if any, then the workers."""
        return tuple(task for task in self.tasks if task.type in ("chief", "worker"))

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that compute gradients: with parameter servers the job `worker`, else `training_tasks`."""
        return tuple(task for task in self.training_tasks if task.type == "worker" or not self.num_ps)

    def address(self, task: Task | None = None) -> str:
        """Returns the "host:port" of a task; of this process' task by default.

        Raises:
          ClusterError: the cluster lists no such task.
        """
        task = task or self.task
        if task.index not in self.jobs.get(task.type, {}):
            listed = ", ".join(map(str, self.tasks))
            raise _wrong(
                "task", f"has no address in this cluster, which lists {listed}", "name one of these", str(task)
            )
        return self.jobs[task.type][task.index]

    def check_multi_worker(self) -> None:
        """Checks that MultiWorkerMirroredStrategy can run here.

        Raises:
          ClusterError: the cluster has a parameter server, no worker that trains, or a gap in the indices.
        """
        strategy = "MultiWorkerMirroredStrategy"
        if self.num_ps:
            raise _wrong(
                "cluster.ps",
                f"has no place under {strategy}, which uses no parameter servers",
                'remove the job "ps" (tfdist launch without --num_ps), or use ParameterServerStrategy',
                self._job_for_json("ps"),
            )
        if self.chief is None:
            raise _wrong(
                "cluster",
                f"lists no chief and no worker 0, and {strategy} needs one of them to lead",
                'add the job "worker"',
                sorted(map(str, self.tasks)),
            )
        self._check_dense("worker", strategy)

    def check_parameter_server(self) -> None:
        """Checks that ParameterServerStrategy can run here.

        Raises:
          ClusterError: there is no chief, no worker or no parameter server; this process is an evaluator; or the chief
            sees a gap in the indices.
        """
        strategy = "ParameterServerStrategy"
        if self.task.type == "evaluator":
            problem = f"is one for which {strategy} has no part yet"
            remedy = "leave the evaluator out of the job, or let its script evaluate checkpoints without this strategy"
            raise _wrong("task.type", problem, remedy, self.task.type)
        for job, role in (("ps", "to hold the variables"), ("worker", "to train"), ("chief", "to coordinate")):
            if job not in self.jobs and job != self.task.type:
                problem = f'lists no job "{job}", and {strategy} needs at least one task {role}'
                flag = {"ps": "--num_ps=1", "worker": "--num_workers=1", "chief": "--chief"}[job]
                remedy = f'add "{job}": ["host:port"], or give tfdist launch {flag}'
                raise _wrong("cluster", problem, remedy, sorted(map(str, self.tasks)))
        if self.task.type == "chief":
            self._check_dense("worker", strategy)
            self._check_dense("ps", strategy)

    def _is_dense(self, job: str) -> bool:
        return list(self.jobs[job]) == list(range(len(self.jobs[job])))

    def _job_for_json(self, job: str) -> list[str] | dict[int, str]:
        return list(self.jobs[job].values()) if self._is_dense(job) else dict(self.jobs[job])

    def _check_dense(self, job: str, strategy: str) -> None:
        if job in self.jobs and not self._is_dense(job):
            problem = f"has gaps in its indices, and {strategy} needs every task from 0 up"
            raise _wrong(f"cluster.{job}", problem, "list them all, without gaps", dict(self.jobs[job]))


# The cluster that a strategy of this process has joined.
_joined: Cluster | None = None


def digest_of(tasks: Iterable[Task]) -> str:
    """16 hexadecimal digits by which tasks compare their clusters.

    Addresses don't count: each machine may write them differently.
    """
    return hashlib.sha256(json.dumps([str(task) for task in tasks]).encode()).hexdigest()[:16]


def _current() -> Cluster | None:
    return _joined or Cluster.from_environment()


_EXAMPLE = (
    f'write {{"cluster": {{"worker": ["host:port", ...]}}, "task": {{"type": "worker", "index": 0}}}}, or {_UNSET}'
)


def _wrong(where: str, problem: str, remedy: str, value: Any) -> ClusterError:
    return ClusterError(f"{where} {problem}; {remedy}. Received: {_shown(value)}")


def _shown(value: Any) -> str:
    """Returns a value as JSON text, on one line and of limited length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # Not repr(value), which may be very long or raise an error of its own.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _parse(text: Any) -> Any:
    if not isinstance(text, str):
        raise _wrong("the value", "is not text", "pass a string, such as json.dumps(config)", text)
    if not text.strip():
        raise _wrong("the value", "is empty", _EXAMPLE, text)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except ClusterError:
        raise
    except RecursionError:
        raise _wrong("the value", "is nested too deeply", _EXAMPLE, text) from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        problem = f"is not JSON ({str(error).partition(';')[0]})"
        raise _wrong("the value", problem, "use double quotes and no trailing comma", text) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise _wrong("the value", f"has the key {_shown(key)} twice in one object", "keep one of them", keys)
    return dict(pairs)


def _refuse_constant(name: str) -> Any:
    raise ClusterError(f"the value contains a number that JSON does not have; write a plain number. Received: {name}")


def _from_config(config: Any) -> Cluster:
    if not isinstance(config, dict):
        raise _wrong("the value", "is not a JSON object", _EXAMPLE, config)
    if not config.get("cluster"):
        having = "has a task but no cluster" if config.get("task") else "has no cluster"
        raise _wrong("the value", having, f'add "cluster", or {_UNSET}', config)
    if not config.get("task"):
        raise _wrong("the value", "has a cluster but no task", 'add "task": {"type": "worker", "index": 0}', config)
    task = config["task"]
    if not isinstance(task, dict):
        raise _wrong("task", "is not an object", 'write {"type": "worker", "index": 0}', task)
    for key, example in (("type", '"worker"'), ("index", "0")):
        if key not in task:
            raise _wrong("task", f"has no {key}", f'add "{key}": {example}', task)
    cluster = Cluster(config["cluster"], Task(task["type"], task["index"]))
    if not cluster.is_listed and cluster.task.type == "chief":
        raise _not_a_job(cluster.task, cluster.jobs)
    return cluster


def _job_name(name: Any, where: str) -> str:
    normal = _OLD_NAMES.get(name, name) if isinstance(name, str) else name
    if normal not in JOBS:
        raise _wrong(where, "is not a known job", f"use one of {', '.join(JOBS)}", name)
    return normal


def _check_task(task: Any, jobs: Mapping[str, Mapping[int, str]]) -> None:
    if not isinstance(task, Task):
        raise _wrong("task", "is not a Task", 'pass Task("worker", 0)', task)
    if task.type == "evaluator" and "evaluator" not in jobs:
        return  # An evaluator takes no part in training, so several schedulers leave it out of the cluster.
    if task.type == "chief" and task.index == 0 and "chief" not in jobs and "ps" in jobs:
        return  # The other tasks need no address of the coordinating program.
    if task.type not in jobs:
        raise _not_a_job(task, jobs)
    if task.index not in jobs[task.type]:
        listed = _ranges(jobs[task.type])
        problem = f"is out of range: cluster.{task.type} has {listed}"
        raise _wrong("task.index", problem, f"use an index that exists, or add the address of {task}", task.index)


def _not_a_job(task: Task, jobs: Mapping[str, Any]) -> ClusterError:
    return _wrong("task.type", "is not a job of this cluster", f"use one of {', '.join(jobs)}", task.type)


def _ranges(tasks: Mapping[int, str]) -> str:
    indices = list(tasks)
    if indices == list(range(len(indices))):
        return "index 0 only" if len(indices) == 1 else f"indices 0 to {len(indices) - 1}"
    return f"the indices {_shown(indices)}"


def _normal_jobs(jobs: Any) -> Mapping[str, Mapping[int, str]]:
    """Checks every job and address, and puts them in canonical order."""
    if not isinstance(jobs, Mapping):
        raise _wrong("cluster", "is not an object", 'write {"worker": ["host:port", ...]}', jobs)
    found: dict[str, Mapping[int, str]] = {}
    for given, tasks in jobs.items():
        job = _job_name(given, f"cluster[{_shown(given)}]")
        if job in found:
            raise _wrong("cluster", "has both a chief and a master, which is its old name", "keep one", list(jobs))
        found[job] = _normal_tasks(str(given), tasks)
    if len(found.get("chief", ())) > 1:
        raise _wrong("cluster.chief", "has more than one task", "keep one, make the others workers", jobs.get("chief"))
    if not any(found.values()):
        raise _wrong("cluster", "lists no task", f'add "worker": ["host:port"], or {_UNSET}', list(jobs))
    _check_unique(found)
    return types.MappingProxyType({job: found[job] for job in JOBS if found.get(job)})


def _normal_tasks(job: str, tasks: Any) -> Mapping[int, str]:
    where = f"cluster.{job}"
    if isinstance(tasks, Mapping):
        pairs = [(_sparse_index(where, key), address) for key, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes, bytearray)):
        pairs = list(enumerate(tasks))
    else:
        raise _wrong(where, "is not a list of addresses", 'write ["host:port", ...]', tasks)
    if len({index for index, _ in pairs}) < len(pairs):
        raise _wrong(where, "has an index twice", "keep one of them", [index for index, _ in pairs])
    for index, address in pairs:
        problem = _sockets.address_problem(address)
        if problem:
            raise _wrong(f"{where}[{index}]", *problem, address)
    return types.MappingProxyType({index: _sockets.normal_address(address) for index, address in sorted(pairs)})


def _sparse_index(where: str, key: Any) -> int:
    """Returns the index of a key of a sparse job, which is a string in JSON."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key:
        key = int(key)
    if type(key) is not int or not 0 <= key <= _MAX_INDEX:
        raise _wrong(where, "has a key that is not an index", 'write {"0": "host:port", ...}', key)
    return key


def _check_unique(jobs: Mapping[str, Mapping[int, str]]) -> None:
    owners: dict[tuple[str, int], str] = {}
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            where = f"cluster.{job}[{index}]"
            other = owners.setdefault(_sockets.address_key(address), where)
            if other != where:
                raise _wrong(where, f"is the same address as {other}", "give each task its own port", address)
