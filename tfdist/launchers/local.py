# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on this machine.

`plan` turns a job into a request of text and numbers; `run_tasks` runs it; a dry run prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from absl import flags

from tfdist.cluster import JOB_SECRET_VARIABLE, Task
from tfdist.launchers import command_line, environment, shape
from tfdist.launchers.requests import (
    TRY_AGAIN_EXIT_CODE,
    LaunchError,
    Request,
    Restarts,
    TaskRequest,
    check_command,
)
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.attempts import run_tasks
from tfdist.launchers.supervise.output import LogSettings
from tfdist.launchers.supervise.processes import PortReservation, Start, start_guard

_USAGE = """\
usage: tfdist launch local [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch local [FLAGS] -m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on this machine. Arguments after SCRIPT are passed to it. Each line of output
starts with the name of its task. If a task fails, the others are ended and its exit code is returned; a worker beside
parameter servers is started again first.

  tfdist launch local --num_workers=3 train.py --epochs=5             for MultiWorkerMirroredStrategy
  tfdist launch local --num_workers=2 --num_ps=1 train.py --epochs=5  for ParameterServerStrategy: a chief is added
"""


@dataclasses.dataclass(frozen=True)
class LocalJob:
    """A job on this machine.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      num_workers: number of workers.
      num_ps: number of parameter servers. With any, there is a chief beside the workers.
      grace_secs: time for tasks to end by themselves, and from the first signal to SIGKILL.
      chief: whether there is a chief beside the workers; None for a chief only with parameter servers.
      evaluator: whether there is an evaluator beside the cluster.
      gpus_per_worker: number of GPUs for each worker; None divides all GPUs evenly.
      restarts: limits of restarts.
      env: variables added to the environment.

    Raises:
      LaunchError: a number is out of range.
    """

    command: tuple[str, ...]
    num_workers: int = 2
    num_ps: int = 0
    grace_secs: float = 3.0
    chief: bool | None = None
    evaluator: bool = False
    gpus_per_worker: int | None = None
    restarts: Restarts = dataclasses.field(default_factory=Restarts)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape.check_restarts(self.restarts)
        shape.check_duration("grace_period_secs", self.grace_secs)
        if self.gpus_per_worker is not None:
            shape.check_count("gpus_per_worker", self.gpus_per_worker)

    @property
    def shape(self) -> Shape:
        """The tasks of the job."""
        return Shape(self.num_workers, self.num_ps, self.chief, self.evaluator)

    @property
    def num_ports(self) -> int:
        """Number of ports: one per member of the cluster."""
        return len(self.shape.members)


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
      ports: `job.num_ports` free ports.
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
        env = {"TF_CONFIG": left.cluster(left_addresses, task).to_tf_config()}
        env |= {**visible.get(places[task], {}), "TFDIST_LAUNCHER": "local", "PYTHONUNBUFFERED": "1"}
        env |= job.env
        tasks.append(TaskRequest(str(task), env, (python, *job.command)))
    return left.request(tasks, job.grace_secs, job.restarts)


def _visible_devices(job: LocalJob, devices: Sequence[str]) -> dict[Task, dict[str, str]]:
    """Returns CUDA_VISIBLE_DEVICES of each task; {} if there is no GPU and none was requested."""
    if not devices and not job.gpus_per_worker:
        return {}
    computing = job.shape.computing
    shares = dict(zip(computing, environment.divide_devices(devices, len(computing), job.gpus_per_worker), strict=True))
    return {task: {environment.VISIBLE: ",".join(shares.get(task, ()))} for task in job.shape.tasks}


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values)
    gpu_help = "GPUs for each worker; by default all are shared out evenly"
    flags.DEFINE_integer("gpus_per_worker", None, gpu_help, flag_values=values)
    define_run_flags(values, grace_period_secs=3.0)


def define_run_flags(values: flags.FlagValues, grace_period_secs: float) -> None:
    """Defines the flags of every launcher that runs until the job has ended."""
    table = {
        "grace_period_secs": (grace_period_secs, "seconds that tasks have to end before SIGKILL"),
        "max_restarts": (0, "restarts of all tasks after failures"),
        "restart_backoff_secs": (1.0, "seconds before the first restart; doubles each time"),
        "max_preemptions": (100, f"restarts of all tasks after a preemption (code {TRY_AGAIN_EXIT_CODE})"),
        "max_worker_restarts": (3, "restarts in a row of a worker that fails, before it is given up"),
        "run": ("", "folder in --task_logs; the time by default"),
        "tee": (True, "print the tasks' output, also where it is logged"),
        "quiet_workers": (
            False,
            "print the output of the chief (and evaluator) alone, and the last lines of a task that fails",
        ),
        "dry_run": (False, "print a shell command per task, start nothing"),
    }
    command_line.define(values, table)
    least_help = "least number of workers to continue with when others are given up; all by default"
    flags.DEFINE_integer("min_workers", None, least_help, flag_values=values)
    flags.DEFINE_string("task_logs", None, "directory for files with each task's output", flag_values=values)
    environment.define_flags(values)


def restarts_from_flags(values: flags.FlagValues) -> Restarts:
    """Reads the restart limits of `define_run_flags`."""
    return Restarts(
        values.max_restarts,
        values.restart_backoff_secs,
        values.max_preemptions,
        values.max_worker_restarts,
        values.min_workers,
    )


def logs_from_flags(values: flags.FlagValues) -> LogSettings:
    """Reads the log settings of `define_run_flags`.

    Raises:
      LaunchError: the run's folder exists, or its name is invalid.
    """
    logs = LogSettings(values.task_logs, values.run, values.tee, values.quiet_workers)
    if logs.directory and logs.run and pathlib.Path(logs.directory, logs.run).exists():
        raise LaunchError(f"--run names a folder that exists in {logs.directory}; use another. Received: {logs.run!r}")
    return logs


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch local`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    devices = [] if values.gpus_per_worker == 0 else environment.present()
    job = LocalJob(
        tuple(command),
        values.num_workers,
        values.num_ps,
        values.grace_period_secs,
        values.chief,
        values.evaluator,
        values.gpus_per_worker,
        restarts_from_flags(values),
        environment.from_flags(values),
    )
    check_command(job.command)
    logs = logs_from_flags(values)
    with PortReservation(job.num_ports) as reservation:
        planned = functools.partial(plan, job, reservation.ports, devices=devices)
        return command_line.submit_or_show(values, planned(), lambda: submit_with_secret(planned, logs))


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
