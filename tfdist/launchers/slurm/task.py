# SPDX-License-Identifier: Apache-2.0
"""Wrapper of one process in a Slurm step: determines its task from SLURM_*, and runs the script as this task.

    srun ... python3 -P -m tfdist.launchers.slurm.task --num_workers=4 -- train.py --epochs=5

Tasks are numbered over the hosts of the step in blocks, as by `srun --distribution=block`. Workers come first, which
have the GPUs, then parameter servers, chief and evaluator.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.cluster import ClusterError, Task
from tfdist.launchers import command_line, environment
from tfdist.launchers.requests import LaunchError, setting
from tfdist.launchers.shape import Shape
from tfdist.launchers.slurm.exits import EXITS_VARIABLE, LOGS_VARIABLE, REACHES_ALL_VARIABLE, Exits
from tfdist.launchers.supervise import wrapping
from tfdist.launchers.supervise.output import QUIET_WORKERS, TaskLogs


def expand_hosts(text: str) -> list[str]:
    """Expands Slurm's host list, such as "rack[0-1]n[08-11]-ib,login", into names, in its order, with repetitions.

    `scontrol show hostnames` does the same, but a task may be in a container without it. A range is padded with zeros
    to the width of its first number; several brackets in one name count like digits, the last one fastest.

    Raises:
      LaunchError: the text is invalid.
    """
    names = re.split(r",(?![^[]*\])", text)
    try:
        if not all(re.fullmatch(r"(?:[^][\s]|\[[^][]+\])+", name) for name in names):
            raise ValueError
        parts = [map(_expand_part, re.findall(r"\[[^]]+\]|[^[]+", name)) for name in names]
        return ["".join(each) for name in parts for each in itertools.product(*name)]
    except ValueError:
        form = "the host list is not written as Slurm does, such as n[01-04,7],login"
        raise LaunchError(f"{form}. Received: {text!r}") from None


def _expand_part(part: str) -> list[str]:
    """Expands "[01-04,7]"; other text stands for itself."""
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for first, _, last in (item.partition("-") for item in part[1:-1].split(",")):
        if not (found := range(int(first), int(last or first) + 1)):
            raise ValueError
        numbers += (f"{number:0{len(first)}d}" for number in found)
    return numbers


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's numbers of tasks per host: "2(x3),1" is [2, 2, 2, 1].

    Raises:
      LaunchError: the text is invalid.
    """
    counts: list[int] = []
    for item in text.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x([1-9]\d*)\))?", item, re.ASCII)):
            raise LaunchError(f"the tasks per host are not written as Slurm does, such as 2(x3),1. Received: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# Below the ephemeral ports of all common systems. Jobs that share a host have ids close to each other.
_FIRST_PORT, _PORTS_PER_JOB, _JOBS = 12000, 16, 1000
# Most tasks of a job on one host without --port.
MOST_WITHOUT_PORT = _PORTS_PER_JOB


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Settings of all processes of a step."""

    port: int = setting(0, "first port of each host; 0 derives it from the job's number", most=65535)
    grace_period_secs: float = setting(30.0, "seconds for the other tasks after one has failed")
    quiet_workers: bool = setting(False, QUIET_WORKERS)


@dataclasses.dataclass(frozen=True)
class SlurmProcess:
    """A process of a Slurm step, and the hosts of all processes.

    Args:
      job_id: id of the job.
      hosts: the host of each process, by its rank in the step.
      number: rank of this process (SLURM_PROCID).
    """

    job_id: int
    hosts: tuple[str, ...]
    number: int

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> SlurmProcess:
        """Reads SLURM_*.

        Raises:
          LaunchError: a variable is missing or invalid.
        """
        hosts = expand_hosts(_text(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
        counts = expand_counts(_text(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
        if len(hosts) != len(counts):
            raise LaunchError(f"Slurm has {len(hosts)} hosts, tasks for {len(counts)}. Received: {hosts}, {counts}")
        placed = tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
        number = _number(env, "SLURM_PROCID")
        if number >= len(placed):
            raise LaunchError(f"SLURM_PROCID is no process of this step of {len(placed)}. Received: {number}")
        return SlurmProcess(_number(env, "SLURM_JOB_ID", "SLURM_JOBID"), placed, number)


def _text(env: Mapping[str, str], *names: str) -> str:
    for name in names:
        if env.get(name):
            return env[name]
    raise LaunchError(f"{names[0]} is not set; run this inside of a job, with srun. Received: nothing")


def _number(env: Mapping[str, str], *names: str) -> int:
    text = _text(env, *names)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise LaunchError(f"{names[0]} is not a number. Received: {text!r}")
    return int(text)


def task_environment(step: SlurmProcess, job: Shape, port: int, env: Mapping[str, str]) -> tuple[Task, dict[str, str]]:
    """Returns the task of a process of a step, and the variables that are added to its environment.

    Args:
      step: this process, and the hosts of all processes.
      job: the tasks of the job.
      port: first port of each host; 0 to derive it from the job's id.
      env: the process' environment.

    Raises:
      LaunchError: the step has another number of processes than the job, or too few ports or GPUs.
      ClusterError: a host name of Slurm is invalid.
    """
    tasks = job.placed
    if len(tasks) != len(step.hosts):
        raise LaunchError(f"the step needs {len(tasks)} processes; use srun --ntasks. Received: {len(step.hosts)}")
    ports = _ports(step, port)
    addresses = {task: f"{host}:{ports[i]}" for i, (task, host) in enumerate(zip(tasks, step.hosts, strict=True))}
    task = tasks[step.number]
    found = job.environment("slurm", [addresses[member] for member in job.members], task)
    return task, found | _gpus(step, tasks, job, env)


def _ports(step: SlurmProcess, port: int) -> list[int]:
    """Returns the port of each process; the processes of one host have consecutive ports."""
    first = port or _FIRST_PORT + step.job_id % _JOBS * _PORTS_PER_JOB
    used: dict[str, int] = {}
    ports = []
    for host in step.hosts:
        ports.append(first + used.setdefault(host, 0))
        used[host] += 1
    if not port and max(used.values()) > MOST_WITHOUT_PORT:
        raise LaunchError(
            f"a host has more tasks than the {MOST_WITHOUT_PORT} for which ports are set aside; use --port. Received: "
            f"{max(used.values())} tasks on one host"
        )
    if max(ports) >= 65535:
        raise LaunchError(f"--port leaves no port for all tasks of a host; use a smaller one. Received: {port}")
    return ports


def _gpus(step: SlurmProcess, tasks: Sequence[Task], job: Shape, env: Mapping[str, str]) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES of this task: its share of the step's GPUs on this host; {} to leave it."""
    if environment.VISIBLE not in env:
        return {}
    if tasks[step.number] not in job.computing:
        return {environment.VISIBLE: ""}
    host = step.hosts[step.number]
    here = [task for task, other in zip(tasks, step.hosts, strict=True) if other == host and task in job.computing]
    devices = [name for name in env[environment.VISIBLE].split(",") if name]
    # Slurm may have bound GPUs to each task already (--gpus-per-task, --gpu-bind); then each task sees only its own.
    on_host = env.get("SLURM_GPUS_ON_NODE", "")
    is_bound = "SLURM_GPUS_PER_TASK" in env or (on_host.isdecimal() and 0 < len(devices) < int(on_host))
    if len(here) == 1 or is_bound:
        return {}
    remedy = f"use --gpus_per_node={len(here)} or more, or fewer --tasks_per_node"
    shares = environment.divide_devices(devices, len(here), None, place=host, remedy=remedy)
    return {environment.VISIBLE: ",".join(shares[here.index(tasks[step.number])])}


def main(arguments: Sequence[str]) -> int:
    """Runs the script as this process' task; returns its exit code."""
    try:
        values, script = command_line.parse(
            lambda flags: command_line.define_settings(flags, Shape, StepSettings), arguments
        )
        job = command_line.from_settings(Shape, values)
        step = SlurmProcess.from_environment(os.environ)
        task, env = task_environment(step, job, values.port, os.environ)
        folder, attempt = os.environ.get(LOGS_VARIABLE), os.environ.get("TFDIST_ATTEMPT", "0")
        logs = TaskLogs(pathlib.Path(folder), int(attempt), _log.say) if folder else None
    except (LaunchError, ClusterError, flags.Error) as error:
        _log.say(" ".join(str(error).split()))
        return 2
    exits = Exits(os.environ.get(EXITS_VARIABLE), job)
    over = None if task in job.deciding else exits.job_has_succeeded
    command = [sys.executable, *script]
    leave = functools.partial(exits.leave, task, grace_secs=values.grace_period_secs)
    reaches_all = os.environ.get(REACHES_ALL_VARIABLE) == "1"

    def note(signum: int) -> bool:
        if signum == signal.SIGTERM:
            exits.note_term(task)
        return not reaches_all

    is_muted = values.quiet_workers and task not in job.reporting
    return wrapping.run_wrapped(command, env, leave, over, str(task), note, is_muted=is_muted, logs=logs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
