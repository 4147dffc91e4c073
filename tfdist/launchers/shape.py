# SPDX-License-Identifier: Apache-2.0
"""Number of tasks of a job by kind, with the same flags, order and roles on all platforms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

from absl import flags

from tfdist.cluster import Cluster, Task
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest


@dataclasses.dataclass(frozen=True)
class Shape:
    """The tasks of a job.

    Args:
      num_workers: number of workers.
      num_ps: number of parameter servers.
      chief: whether there is a chief beside the workers; None for a chief only with parameter servers.
      evaluator: whether there is an evaluator beside the cluster.

    Raises:
      LaunchError: a number is out of range, or parameter servers have no chief.
    """

    num_workers: int = 2
    num_ps: int = 0
    chief: bool | None = None
    evaluator: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise LaunchError(f"--num_workers is too small; use 1 or more. Received: {self.num_workers}")
        if self.num_ps < 0:
            raise LaunchError(f"--num_ps is too small; use 0 for no parameter server. Received: {self.num_ps}")
        if self.chief is None:
            object.__setattr__(self, "chief", self.num_ps > 0)
        if self.num_ps and not self.chief:
            raise LaunchError(
                f"--nochief leaves no task to coordinate the workers; remove it, or use --num_ps=0. Received: "
                f"--nochief with --num_ps={self.num_ps}"
            )

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
        return tuple(
            task for task in self.members if task.type == "worker" or (task.type == "chief" and not self.num_ps)
        )

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

    def check_restarts(self, restarts: Restarts) -> None:
        """Checks that the limits of restarts fit the number of workers.

        Raises:
          LaunchError: --min_workers is out of range, or could never have an effect.
        """
        least = restarts.min_workers
        if least is None:
            return
        if not 1 <= least <= self.num_workers:
            raise LaunchError(
                f"--min_workers is out of range; use 1 to --num_workers={self.num_workers}. Received: {least}"
            )
        if not self.num_ps and not restarts.max_restarts:
            raise LaunchError(
                "--min_workers has no effect without a restart, where there is no parameter server; add "
                f"--max_restarts=3. Received: --min_workers={least} with --max_restarts=0"
            )

    def cluster(self, addresses: Sequence[str], task: Task) -> Cluster:
        """Builds the cluster for one of its tasks.

        Args:
          addresses: "host:port" of each of `members`.
          task: one of `tasks`.

        Raises:
          ClusterError: an address is invalid, or occurs twice.
        """
        return _cluster(self, tuple(addresses)).with_task(task)

    def request(self, tasks: Sequence[TaskRequest], grace_secs: float, restarts: Restarts) -> Request:
        """Builds the request for these tasks, with their roles in this job."""
        deciding, computing = (tuple(map(str, group)) for group in (self.deciding, self.computing))
        return Request(
            tuple(tasks),
            frozenset(deciding),
            grace_secs,
            restarts,
            computing,
            replaces_workers=self.num_ps > 0,
            reporting=frozenset(map(str, self.reporting)),
        )

    def arguments(self) -> tuple[str, ...]:
        """Returns the flags from which `from_flags` builds this shape, for a wrapper on another machine."""
        shown = [f"--num_workers={self.num_workers}", f"--num_ps={self.num_ps}"]
        shown.append("--chief" if self.chief else "--nochief")
        return (*shown, *(["--evaluator"] if self.evaluator else []))

    @staticmethod
    def from_flags(values: flags.FlagValues) -> Shape:
        """Builds the shape from the flags of `define_flags`."""
        return Shape(values.num_workers, values.num_ps, values.chief, values.evaluator)


@functools.lru_cache(1)  # A plan calls it for each of its tasks.
def _cluster(shape: Shape, addresses: tuple[str, ...]) -> Cluster:
    jobs: dict[str, dict[int, str]] = {}
    for member, address in zip(shape.members, addresses, strict=True):
        jobs.setdefault(member.type, {})[member.index] = address
    return Cluster(jobs, shape.members[0])


def define_flags(values: flags.FlagValues, num_workers: int | None = 2) -> None:
    """Defines the flags for the number of tasks; without a default, workers fill the slots of the hosts."""
    text = "workers to start" if num_workers else "workers to start; by default as many as the hosts have slots for"
    flags.DEFINE_integer("num_workers", num_workers, text, flag_values=values)
    flags.DEFINE_integer("num_ps", 0, "parameter servers to start; with any, also a chief", flag_values=values)
    flags.DEFINE_boolean(
        "chief", None, "start a chief beside the workers (as parameter servers need)", flag_values=values
    )
    flags.DEFINE_boolean("evaluator", False, "start an evaluator beside the cluster", flag_values=values)


def check_count(flag: str, value: int, least: int = 0) -> None:
    """Checks an integer from the command line.

    Raises:
      LaunchError: the value is less than `least`.
    """
    if value < least:
        raise LaunchError(f"--{flag} is too small; use {least} or more. Received: {value}")


def check_duration(flag: str, value: float) -> None:
    """Checks a number of seconds from the command line.

    Raises:
      LaunchError: the value is negative, infinite, or NaN.
    """
    if not 0 <= value < math.inf:
        raise LaunchError(f"--{flag} is not a duration; use 0 or more. Received: {value}")
