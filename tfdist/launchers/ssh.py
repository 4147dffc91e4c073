# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster on remote machines, by ssh.

Each task has a local process that holds its connection (`tfdist.launchers.ssh_client`); on the remote machine
`tfdist.launchers.ssh_task` runs the task. `plan` assigns tasks to hosts; `submit` runs them; a dry run prints the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata

from absl import flags

import tfdist
from tfdist.cluster import DATA_SERVICE_VARIABLE, Task
from tfdist.launchers import (
    command_line,
    communication,
    hostfile,
    local,
    shape,
    ssh_client,
    ssh_preflight,
    telemetry,
    tf_log_level,
    tools,
)
from tfdist.launchers.gpus import VISIBLE
from tfdist.launchers.hostfile import Host
from tfdist.launchers.requests import SENT_PREFIX, LaunchError, Request, Restarts, TaskRequest
from tfdist.launchers.shape import Shape
from tfdist.launchers.ssh_task import ORPHAN_SECS

_USAGE = """\
usage: tfdist launch ssh --hosts=HOST[:SLOTS],... [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch ssh --hostfile=FILE [FLAGS] -m MODULE [ARGUMENTS]

Starts SCRIPT as every task of a cluster on these hosts, and stays until the job is over. Arguments after SCRIPT are
passed to it. SCRIPT is looked for on each host, which needs the same Python and tfdist, and an ssh login without a
password.

  tfdist launch ssh --hosts=a,b,c,d --num_workers=4 train.py --epochs=5     for MultiWorkerMirroredStrategy
  tfdist launch ssh --hostfile=hosts --num_workers=3 --num_ps=1 train.py    for ParameterServerStrategy

flags (also from a file, with --flagfile=FILE):
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job on remote machines.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      hosts: the machines; their slots are filled in this order: workers, parameter servers, chief, evaluator.
      shape: the tasks of the job.
      directory: working directory of the script on each host.
      python: the interpreter on the hosts.
      port: first port of each host, whose tasks have consecutive ports.
      gpus_per_worker: number of GPUs for each worker; None to leave the host's CUDA_VISIBLE_DEVICES.
      env: variables added to the environment of the tasks.
      ssh_options: options of ssh, such as "-p2222".
      grace_secs: time for tasks to end by themselves, and from the first signal to SIGKILL.
      restarts: limits of restarts.

    Raises:
      LaunchError: a value is out of range, or there are too few slots.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    shape: Shape = dataclasses.field(default_factory=Shape)
    directory: str = "."
    python: str = "python3"
    port: int = 2222
    gpus_per_worker: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ssh_options: tuple[str, ...] = ()
    grace_secs: float = 10.0
    restarts: Restarts = dataclasses.field(default_factory=Restarts)

    def __post_init__(self) -> None:
        if not self.command:
            raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
        slots = sum(host.slots for host in self.hosts)
        needed = len(self.shape.tasks)
        if slots < needed:
            raise LaunchError(
                f"the hosts have too few slots for {needed} tasks; add hosts, or write host slots=N. Received: {slots} "
                f"slots on {len(self.hosts)} hosts"
            )
        self.shape.check_restarts(self.restarts)
        shape.check_duration("grace_period_secs", self.grace_secs)
        if self.gpus_per_worker is not None:
            shape.check_count("gpus_per_worker", self.gpus_per_worker)
        if not 0 < self.port <= 65535 - max(host.slots for host in self.hosts):
            raise LaunchError(f"--port leaves no port for each slot; use a smaller number. Received: {self.port}")
        for option in self.ssh_options:
            if not option.startswith("-") or option == "--":
                raise LaunchError(f"--ssh is no option of ssh; write --ssh=-p2222. Received: {option!r}")

    @property
    def places(self) -> dict[Task, tuple[Host, int]]:
        """Host of each task, and the index of its slot there."""
        free = [(host, slot) for host in self.hosts for slot in range(host.slots)]
        return dict(zip(self.shape.placed, free, strict=False))

    @property
    def data_service_port(self) -> int:
        """Port of the tf.data service: on the chief's host, after the ports of its tasks."""
        host, _ = self.places[Task("chief", 0)]
        return self.port + sum(other == host for other, _ in self.places.values())


def plan(job: Job, dropped: Collection[str] = ()) -> Request:
    """Returns the local process of each task that `submit` would start.

    Args:
      job: the job.
      dropped: names of workers to leave out. The others are renumbered, and keep their hosts and ports.

    Raises:
      LaunchError: no worker is left.
    """
    places = job.places
    addresses = {task: f"{host.address}:{job.port + slot}" for task, (host, slot) in places.items()}
    common = {"TFDIST_LAUNCHER": "ssh", "PYTHONUNBUFFERED": "1", **job.env}
    if job.shape.num_ps:
        common[DATA_SERVICE_VARIABLE] = f"{places[Task('chief', 0)][0].address}:{job.data_service_port}"
    visible = _visible_devices(job)
    left, whole = job.shape.without(dropped)
    left_addresses = [addresses[whole[member]] for member in left.members]
    tasks = []
    for task in left.tasks:
        config = left.cluster(left_addresses, task).to_tf_config()
        env = {"TF_CONFIG": config, **common, **visible.get(whole[task], {})}
        login = places[whole[task]][0].login
        client = (sys.executable, "-P", "-m", "tfdist.launchers.ssh_client", login, job.python, job.directory)
        command = (*client, *job.ssh_options, "--", *job.command)
        sent = {SENT_PREFIX + name: value for name, value in env.items()}
        probe = tuple(ssh_client.probe(login, job.ssh_options))
        tasks.append(TaskRequest(str(task), sent, command, login, probe))
    request = left.request(tasks, job.grace_secs, job.restarts)
    return dataclasses.replace(request, orphan_secs=ORPHAN_SECS)


def _visible_devices(job: Job) -> dict[Task, dict[str, str]]:
    if job.gpus_per_worker is None:
        return {}
    used: dict[Host, int] = {}
    found = {}
    for task, (host, _) in job.places.items():
        first = used.get(host, 0)
        count = job.gpus_per_worker if task in job.shape.computing else 0
        found[task] = {VISIBLE: ",".join(map(str, range(first, first + count)))}
        used[host] = first + count
    return found


def preflight(job: Job, timeout_secs: float = 30.0) -> list[str]:
    """Checks every host before any task starts; returns warnings.

    Raises:
      LaunchError: a host can't be used.
    """
    tools.find("ssh", "install an OpenSSH client")
    asked: dict[str, dict[str, object]] = {}
    files = [] if job.command[0] == "-m" else [job.command[0]]
    for task, (host, slot) in job.places.items():
        entry = asked.setdefault(host.login, {"directory": job.directory, "files": files, "ports": [], "gpus": 0})
        ports, gpus = entry["ports"], entry["gpus"]
        if isinstance(ports, list) and isinstance(gpus, int):
            ports.extend([job.port + slot] if task in job.shape.members else [])
            ports.extend([job.data_service_port] if job.shape.num_ps and task.type == "chief" else [])
            entry["gpus"] = gpus + (job.gpus_per_worker or 0) * (task in job.shape.computing)
    here = {"Python": ".".join(map(str, sys.version_info[:2])), "tfdist": tfdist.__version__}
    for name in ("tensorflow", "keras"):
        try:
            here[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # A machine that only launches need not have the package.
    return ssh_preflight.check(asked, job.python, job.ssh_options, here, timeout_secs)


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    flags.DEFINE_string("hosts", "", "hosts, such as a,user@b:2", flag_values=values)
    flags.DEFINE_string("hostfile", "", 'file with lines such as "host slots=2"', flag_values=values)
    shape.define_flags(values)
    flags.DEFINE_string("directory", "", "where to run; the current directory by default", flag_values=values)
    flags.DEFINE_string("python", sys.executable, "interpreter on the hosts", flag_values=values)
    flags.DEFINE_integer("port", 2222, "first port of each host; its tasks count up from there", flag_values=values)
    gpu_help = "GPUs for each worker; by default what the host shows"
    flags.DEFINE_integer("gpus_per_worker", None, gpu_help, flag_values=values)
    flags.DEFINE_multi_string("env", [], "NAME=VALUE for all tasks; may be repeated", flag_values=values)
    flags.DEFINE_multi_string("ssh", [], "one more option of ssh, such as -p2222; may be repeated", flag_values=values)
    flags.DEFINE_float("preflight_secs", 30.0, "how long a host may take to answer; 0 asks none", flag_values=values)
    local.define_run_flags(values, grace_period_secs=10.0)


def job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> Job:
    """Returns the job that the command line describes.

    Raises:
      LaunchError: the job is invalid.
    """
    if bool(values.hosts) == bool(values.hostfile):
        received = "both" if values.hosts else "neither"
        raise LaunchError(f"say where to run by one of --hosts=a,b and --hostfile=FILE. Received: {received}")
    hosts = hostfile.from_flag(values.hosts) if values.hosts else hostfile.read(values.hostfile)
    return Job(
        tuple(command),
        tuple(hosts),
        Shape.from_flags(values),
        directory=values.directory or str(pathlib.Path.cwd()),
        python=values.python,
        port=values.port,
        gpus_per_worker=values.gpus_per_worker,
        env=_environment(values),
        ssh_options=tuple(values.ssh),
        grace_secs=values.grace_period_secs,
        restarts=local.restarts_from_flags(values),
    )


def _environment(values: flags.FlagValues) -> dict[str, str]:
    level = tf_log_level.environment(values.tf_log_level, os.environ, is_filtered=bool(values.gpus_per_worker))
    chosen = communication.environment(values.communication) | telemetry.environment(values.telemetry)
    return chosen | level | tools.parse_environment("env", values.env)


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch ssh`. See `command_line.run`."""
    return command_line.run(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = job_from_flags(values, command)
    shape.check_duration("preflight_secs", values.preflight_secs)
    logs = local.logs_from_flags(values)
    request = plan(job)

    def start() -> int:
        for warning in preflight(job, values.preflight_secs) if values.preflight_secs else []:
            sys.stderr.write(f"tfdist: {warning}\n")
        return local.submit_with_secret(functools.partial(plan, job), logs)

    return command_line.submit_or_show(values, request, start)
