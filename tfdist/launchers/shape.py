# SPDX-License-Identifier: Apache-2.0
"""Number of tasks of a job by kind, with the same flags, order and roles on all platforms."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import flags

from tfdist.cluster import Cluster, Task
from tfdist.launchers import command_line, environment
from tfdist.launchers.command_line import JobT
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest, setting


@dataclasses.dataclass(frozen=True)
class Shape:
    """The tasks of a job.

    Raises:
      LaunchError: no worker is left, or parameter servers have no chief.
    """

    num_workers: int = setting(2, "workers to start", least=1)
    num_ps: int = setting(0, "parameter servers to start; with any, also a chief")
    chief: bool | None = setting(None, "start a chief beside the workers (as parameter servers need)", bool)
    evaluator: bool = setting(False, "start an evaluator beside the cluster")

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise LaunchError(f"--num_workers is too small; use 1 or more. Received: {self.num_workers}")
        if self.chief is None:
            object.__setattr__(self, "chief", self.num_ps > 0)
        if self.num_ps and not self.chief:
            raise LaunchError(
                f"--nochief leaves no task to coordinate the workers; remove it, or use --num_ps=0. Received: "
                f"--nochief with --num_ps={self.num_ps}"
            )

    def __str__(self) -> str:
        kinds = [task.type for task in self.tasks]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    @functools.cached_property  # Of thousands of tasks, each of which needs it.
    def members(self) -> tuple[Task, ...]:
        """The tasks of the cluster, each of which needs an address: chief, workers, parameter servers."""
        sizes = {"chief": int(bool(self.chief)), "worker": self.num_workers, "ps": self.num_ps}
        return tuple(Task(job, index) for job, size in sizes.items() for index in range(size))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every process of the job, in the order in which they are started: the members, then the evaluator."""
        return self.members + ((Task("evaluator", 0),) if self.evaluator else ())

    @property
    def placed(self) -> tuple[Task, ...]:
        """All processes in the order in which hosts are filled: workers, which have the accelerators, come first."""
        order = ("worker", "ps", "chief", "evaluator")
        return tuple(sorted(self.tasks, key=lambda task: (order.index(task.type), task.index)))

    @property
    def deciding(self) -> tuple[Task, ...]:
        """Tasks that must succeed for the job to succeed: the chief with parameter servers, else chief and workers."""
        roles = ("chief",) if self.num_ps else ("chief", "worker")
        return tuple(task for task in self.members if task.type in roles)

    @property
    def computing(self) -> tuple[Task, ...]:
        """The tasks that need the accelerators."""
        roles = ("worker",) if self.num_ps else ("chief", "worker")
        return tuple(task for task in self.members if task.type in roles)

    @property
    def reporting(self) -> tuple[Task, ...]:
        """The tasks whose output no other task repeats: the chief, or else the first worker, and the evaluator."""
        return tuple(task for task in self.tasks if task == self.members[0] or task.type == "evaluator")

    def without(self, dropped: Collection[str]) -> tuple[Shape, dict[Task, Task]]:
        """Returns the same job without some workers, and a dict from each of its tasks to this job's task.

        Tasks are renumbered without gaps. If the chief of an all-reduce job is dropped, the first worker leads. If only
        the chief is left, it becomes a worker.

        Args:
          dropped: names of tasks in `computing`, such as "worker:1".

        Raises:
          LaunchError: no worker is left.
        """
        left = [task for task in self.tasks if str(task) not in dropped]
        workers = sum(task.type == "worker" for task in left)
        chief = any(task.type == "chief" for task in left)
        if chief and not workers and not self.num_ps:
            workers, chief = 1, False
        smaller = Shape(workers, self.num_ps, chief, self.evaluator)
        return smaller, dict(zip(smaller.tasks, left, strict=True))

    def environment(self, launcher: str, addresses: Sequence[str], task: Task) -> dict[str, str]:
        """Returns the variables of one of `tasks`: its cluster, and the name of its launcher.

        Args:
          launcher: the platform, such as "local".
          addresses: "host:port" of each of `members`.
          task: the task.

        Raises:
          ClusterError: an address is invalid, or occurs twice.
        """
        config = _cluster(self, tuple(addresses)).with_task(task).to_tf_config()
        return {"TF_CONFIG": config, "TFDIST_LAUNCHER": launcher, "PYTHONUNBUFFERED": "1"}

    def arguments(self) -> tuple[str, ...]:
        """Returns the flags from which `from_settings` builds this shape, for a wrapper on another machine."""
        shown = [f"--num_workers={self.num_workers}", f"--num_ps={self.num_ps}"]
        shown.append("--chief" if self.chief else "--nochief")
        return (*shown, *(["--evaluator"] if self.evaluator else []))


@dataclasses.dataclass(frozen=True)
class Job:
    """A script as every task of a cluster. Those of the launchers add their settings.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      shape: the tasks.
      env: variables added to the environment of each task.
    """

    command: tuple[str, ...]
    shape: Shape = dataclasses.field(default_factory=Shape)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@functools.lru_cache(1)  # A plan calls it for each of its tasks.
def _cluster(shape: Shape, addresses: tuple[str, ...]) -> Cluster:
    jobs: dict[str, dict[int, str]] = {}
    for member, address in zip(shape.members, addresses, strict=True):
        jobs.setdefault(member.type, {})[member.index] = address
    return Cluster(jobs, shape.members[0])


@dataclasses.dataclass(frozen=True)
class SupervisedJob(Job):
    """A job whose launcher stays until it is over.

    Args:
      restarts: limits of restarts.

    Raises:
      LaunchError: --min_workers is out of range, or could never have an effect.
    """

    restarts: Restarts = dataclasses.field(default_factory=Restarts)
    grace_period_secs: float = setting(10.0, "seconds that tasks have to end before SIGKILL")

    def __post_init__(self) -> None:
        least = self.restarts.min_workers
        if least and least > self.shape.num_workers:
            raise LaunchError(
                f"--min_workers is out of range; use 1 to --num_workers={self.shape.num_workers}. Received: {least}"
            )
        if least and not self.shape.num_ps and not self.restarts.max_restarts:
            raise LaunchError(
                "--min_workers has no effect without a restart, where there is no parameter server; add "
                f"--max_restarts=3. Received: --min_workers={least} with --max_restarts=0"
            )

    def request(self, left: Shape, tasks: Sequence[TaskRequest]) -> Request:
        """Returns the request for the tasks that are left of the job, with their roles."""
        return Request(
            tuple(tasks),
            frozenset(map(str, left.deciding)),
            self.grace_period_secs,
            self.restarts,
            tuple(map(str, left.computing)),
            replaces_workers=left.num_ps > 0,
            reporting=frozenset(map(str, left.reporting)),
        )


def define_flags(values: flags.FlagValues, *jobs: type, has_env: bool = True, has_communication: bool = True) -> None:
    """Defines the flags of a launcher: the settings of these dataclasses, and those that become variables of tasks.

    Args:
      values: gets the flags.
      *jobs: dataclasses with a `requests.setting` for each flag.
      has_env: False for tasks that have the environment of this command anyway.
      has_communication: False for TPUs, whose strategy is TensorFlow's.
    """
    command_line.define_settings(values, *jobs)
    command_line.define(values, {"dry_run": (False, "print what would be run or submitted, and do nothing else")})
    if has_env:
        command_line.define(values, {"env": ([], "NAME=VALUE for all tasks, or NAME alone; may be repeated")})
    environment.define_flags(values, has_communication)


def job_from_flags(job: type[JobT], values: flags.FlagValues, command: Sequence[str], **others: Any) -> JobT:
    """Builds the job of a launcher, a dataclass: its settings, script, tasks, restarts, variables and other values.

    Raises:
      LaunchError: the job is invalid.
    """
    if re.search(r"\s-", python := getattr(values, "python", "")):
        raise LaunchError(f"--python is a program without arguments; --env sets its variables. Received: {python!r}")
    names = {field.name for field in dataclasses.fields(job)}  # pyright: ignore[reportArgumentType]
    parts = {name: part for name, part in (("shape", Shape), ("restarts", Restarts)) if name in names}
    found = {name: command_line.from_settings(part, values) for name, part in parts.items()}
    env = environment.from_flags(values)
    return command_line.from_settings(job, values, command=tuple(command), env=env, **found, **others)
