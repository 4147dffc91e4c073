# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on this machine.

`plan` turns a job into a request of text and numbers; `run_tasks` runs it; a dry run prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import sys
from collections.abc import Callable, Collection, Sequence

from absl import flags

from tfdist.cluster import JOB_SECRET_VARIABLE, Task
from tfdist.launchers import command_line, environment, shape
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest, check_command, setting
from tfdist.launchers.shape import Shape, SupervisedJob
from tfdist.launchers.supervise.attempts import run_tasks
from tfdist.launchers.supervise.output import LogSettings
from tfdist.launchers.supervise.processes import PortReservation, Start, start_guard

_USAGE = """\
usage: tfdist launch local [FLAGS] SCRIPT|-m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on this machine. Arguments after SCRIPT are passed to it. Each line of output
starts with the name of its task. If a task fails, the others are ended and its exit code is returned; a worker beside
parameter servers is started again first.

  tfdist launch local --num_workers=3 train.py --epochs=5             for MultiWorkerMirroredStrategy
  tfdist launch local --num_workers=2 --num_ps=1 train.py --epochs=5  for ParameterServerStrategy: a chief is added
"""
_MOST_TASKS = 1024


@dataclasses.dataclass(frozen=True)
class LocalJob(SupervisedJob):
    """A job on this machine."""

    grace_period_secs: float = setting(3.0, "seconds that tasks have to end before SIGKILL")
    gpus_per_worker: int | None = setting(None, "GPUs for each worker; by default all are shared out evenly", int)


def plan(
    job: LocalJob,
    ports: Sequence[int],
    python: str = sys.executable,
    devices: Sequence[str] = (),
    dropped: Collection[str] = (),
) -> Request:
    """Returns the processes that `run_tasks` would start.

    Args:
      job: the job.
      ports: free ports, one for each member of the cluster.
      python: the interpreter.
      devices: the available GPUs, which are divided among the workers.
      dropped: names of workers to leave out. The others are renumbered, and keep their ports and GPUs.

    Raises:
      LaunchError: there are too few GPUs, or no worker is left.
    """
    free = iter(ports)
    addresses = {member: f"127.0.0.1:{next(free)}" for member in job.shape.members}
    visible = _visible_devices(job, devices)
    left, places = job.shape.without(dropped)
    left_addresses = [addresses[places[member]] for member in left.members]
    tasks = []
    for task in left.tasks:
        env = {**left.environment("local", left_addresses, task), **visible.get(places[task], {}), **job.env}
        tasks.append(TaskRequest(str(task), env, (python, *job.command)))
    return job.request(left, tasks)


def _visible_devices(job: LocalJob, devices: Sequence[str]) -> dict[Task, dict[str, str]]:
    """Returns CUDA_VISIBLE_DEVICES of each task; {} if there is no GPU and none was requested."""
    if not devices and not job.gpus_per_worker:
        return {}
    computing = job.shape.computing
    shares = dict(zip(computing, environment.divide_devices(devices, len(computing), job.gpus_per_worker), strict=True))
    return {task: {environment.VISIBLE: ",".join(shares.get(task, ()))} for task in job.shape.tasks}


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, Shape, LocalJob, Restarts, LogSettings, has_env=False)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    devices = [] if values.gpus_per_worker == 0 else environment.present()
    job = shape.job_from_flags(LocalJob, values, command)
    check_command(job.command)
    if len(job.shape.tasks) > _MOST_TASKS:
        raise LaunchError(f"a machine runs at most {_MOST_TASKS} tasks; use fewer --num_workers. Received: {job.shape}")
    logs = command_line.from_settings(LogSettings, values)
    with PortReservation(len(job.shape.members)) as reservation:
        planned = functools.partial(plan, job, reservation.ports, devices=devices)
        return command_line.submit_or_show(values, planned(), lambda: submit_with_secret(planned, logs))


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)


def submit_with_secret(planned: Callable[..., Request], logs: LogSettings, start: Start = start_guard) -> int:
    """Submits a request, with a new job secret in the environment of its tasks; a dry run doesn't show the secret.

    Args:
      planned: returns the request without the workers named as `dropped`.
      logs: log settings.
      start: starts each task; on this machine by default.
    """
    secret = {JOB_SECRET_VARIABLE: secrets.token_hex(32)}

    def with_secret(dropped: frozenset[str] = frozenset()) -> Request:
        request = planned(dropped=dropped)
        tasks = tuple(dataclasses.replace(task, env={**task.env, **secret}) for task in request.tasks)
        return dataclasses.replace(request, tasks=tasks)

    return run_tasks(with_secret(), logs, with_secret, start)
