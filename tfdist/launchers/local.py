# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on this machine.

`plan` turns a job into a request, which is text and numbers only; `submit` carries it out. A dry run prints it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

from absl import flags

from tfdist.cluster import Cluster, Task
from tfdist.launchers import command_line
from tfdist.launchers.ports import PortReservation
from tfdist.launchers.requests import LaunchError, Request, TaskRequest, check_command
from tfdist.launchers.running import submit

_USAGE = """\
usage: tfdist launch local [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch local [FLAGS] -m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on this machine. What follows SCRIPT is its own. Each line of output starts
with the name of its task. If a task fails, the others are ended and its exit code is returned.

  tfdist launch local --num_workers=3 train.py --epochs=5             for MultiWorkerMirroredStrategy
  tfdist launch local --num_workers=2 --num_ps=1 train.py --epochs=5  for ParameterServerStrategy: a chief is added

flags (also from a file, with --flagfile=FILE):
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      num_workers: tasks of the job `worker`.
      num_ps: parameter servers. With any, there is a chief beside the workers; with none, worker 0 leads.
      grace_secs: given to tasks to end by themselves, and from the first signal to SIGKILL.

    Raises:
      LaunchError: a number is out of range, or there is no script.
    """

    command: tuple[str, ...]
    num_workers: int = 2
    num_ps: int = 0
    grace_secs: float = 3.0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise LaunchError(f"--num_workers is too small; use 1 or more. Received: {self.num_workers}")
        if self.num_ps < 0:
            raise LaunchError(f"--num_ps is too small; use 0 for no parameter server. Received: {self.num_ps}")
        if not 0 <= self.grace_secs < math.inf:
            raise LaunchError(f"--grace_secs is not a duration; use 0 or more. Received: {self.grace_secs}")
        if not self.command:
            raise LaunchError("there is no script to run; name one after the flags. Received: nothing")

    @property
    def num_tasks(self) -> int:
        """How many processes there will be, and so how many ports are needed."""
        return self.num_workers + self.num_ps + (self.num_ps > 0)


def plan(job: Job, ports: Sequence[int], python: str = sys.executable) -> Request:
    """What `submit` would start.

    Args:
      job: what to run.
      ports: one free port per task, `job.num_tasks` of them.
      python: the interpreter.
    """
    free = iter(ports)
    leader = Task("chief" if job.num_ps else "worker", 0)
    sizes = {"chief": int(job.num_ps > 0), "worker": job.num_workers, "ps": job.num_ps}
    jobs = {name: {i: f"127.0.0.1:{next(free)}" for i in range(size)} for name, size in sizes.items()}
    cluster = Cluster(jobs, leader)
    tasks = tuple(_task_request(cluster.with_task(task), (python, *job.command)) for task in cluster.tasks)
    deciding = frozenset(str(task) for task in cluster.tasks if task.type == leader.type)
    return Request(tasks, deciding, job.grace_secs)


def _task_request(cluster: Cluster, command: tuple[str, ...]) -> TaskRequest:
    env = {"TF_CONFIG": cluster.to_tf_config(), "TFDIST_LAUNCHER": "local", "PYTHONUNBUFFERED": "1"}
    return TaskRequest(str(cluster.task), env, command)


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    flags.DEFINE_integer("num_workers", 2, "workers to start", flag_values=values)
    flags.DEFINE_integer("num_ps", 0, "parameter servers to start; with any, also a chief", flag_values=values)
    flags.DEFINE_float("grace_secs", 3.0, "seconds that tasks have to end before SIGKILL", flag_values=values)
    flags.DEFINE_boolean("dry_run", False, "print a shell command per task, start nothing", flag_values=values)


def main(arguments: Sequence[str]) -> int:
    """`tfdist launch local`.

    Args:
      arguments: what follows on the command line.

    Returns:
      The exit code.

    Raises:
      LaunchError: there is no such script, or a number is out of range.
      absl.flags.Error: a flag is unknown or its value can't be parsed.
    """
    values, command = command_line.parse(define_flags, arguments)
    if values.help:
        sys.stdout.write(_USAGE + command_line.describe(values))
        return 0
    job = Job(tuple(command), values.num_workers, values.num_ps, values.grace_secs)
    check_command(job.command)
    with PortReservation(job.num_tasks) as reservation:
        request = plan(job, reservation.ports)
        if not values.dry_run:
            return submit(request)
        sys.stdout.write(str(request))
        return 0
