# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster in a Slurm job.

`plan` renders the batch script, `submit` passes it to `sbatch`; a dry run prints it. Inside of the job,
`tfdist.launchers.slurm.task` determines each process' task from SLURM_*.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, environment, shape, tools
from tfdist.launchers.requests import LaunchError, check_command, check_folder, make_folder, shell_code
from tfdist.launchers.shape import Shape
from tfdist.launchers.slurm import job as slurm_job
from tfdist.launchers.slurm.task import MOST_WITHOUT_PORT

_USAGE = """\
usage: tfdist launch slurm [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch slurm [FLAGS] -m MODULE [ARGUMENTS]

Submits a Slurm job that runs SCRIPT as every task of a cluster. Arguments after SCRIPT are passed to it. The hosts must
share the directory from which this is called, and have tfdist in the same place.

  tfdist launch slurm --num_workers=4 --gpus_per_node=4 --time=4:00:00 train.py     for MultiWorkerMirroredStrategy
  tfdist launch slurm --num_workers=8 --num_ps=2 --tasks_per_node=4 train.py        for ParameterServerStrategy
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_\[\]-]+", re.ASCII)
# A node as sinfo lists it.
_NODE = re.compile(r"(\S+)\s+(\d+)\s+([1-9]\d*)\s+(.*)", re.ASCII)
# Options that set the CPUs of a task, or which of a node can be used; also as ends of variables.
_SETS_CPUS = re.compile(r"-[cSB]|--(?:[a-z_-]*(?:cpus|core|thread)|hint|sockets|extra-n)")
# Numbers of GPUs in a node's GRES, such as "gpu:a100:4(S:0-1)".
_GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:(\d+)")
# Beginnings of sbatch options that only hosts with GPUs get.
_GPU_OPTIONS = ("--gpu", "--gres", "--tres")
# Flags of the launcher that are options of sbatch under the same name, in the order of the #SBATCH lines.
_OPTIONS = ("partition", "account", "qos", "time", "mem", "constraint", "output")


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A Slurm job.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      shape: the tasks of the job.
      name: name of the job.
      directory: working directory, shared by all hosts.
      python: the interpreter on the hosts.
      tasks_per_node: number of tasks on each host.
      cpus_per_task: number of CPUs for each task; 0 for Slurm's default.
      gpus_per_node: number of GPUs of each host, which are divided among the workers there; 0 for none.
      max_restarts: number of requeues after failures.
      max_preemptions: number of requeues after preemptions, which are no failures.
      pre_kill_secs: time before the time limit at which the tasks get SIGTERM, to save their work.
      grace_secs: time for the other tasks to end after one has failed.
      port: first port of each host; 0 to derive it from the job's id.
      env: variables added to the environment.
      task_logs: directory for a file of each task's output, with %j for the job's id; "" for none.
      options: values of sbatch options by name; empty values are left out.
      extra: further options of sbatch, such as "--exclusive".
      srun: further options of srun, such as "--container-image=me/train:1".
      setup: shell lines before the tasks, such as "module load cuda".
      quiet_workers: whether only the chief and the evaluator write to the job's output.

    Raises:
      LaunchError: a value is out of range, or can't be written into a batch script.
    """

    command: tuple[str, ...]
    shape: Shape = dataclasses.field(default_factory=Shape)
    name: str = "tfdist"
    directory: str = "."
    python: str = "python3"
    tasks_per_node: int = 1
    cpus_per_task: int = 0
    gpus_per_node: int = 0
    max_restarts: int = 0
    max_preemptions: int = 100
    pre_kill_secs: int = 120
    grace_secs: float = 30.0
    port: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    task_logs: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    quiet_workers: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--name is no name for a job; use up to 64 letters, digits, dots and dashes. Received: {self.name!r}"
            )
        for flag, least in (("tasks_per_node", 1), ("cpus_per_task", 0), ("gpus_per_node", 0)):
            shape.check_count(flag, getattr(self, flag), least)
        for flag in ("max_restarts", "max_preemptions"):
            shape.check_count(flag, getattr(self, flag))
        if not 0 <= self.pre_kill_secs <= 65535:
            raise LaunchError(
                f"--pre_kill_secs is out of Slurm's range; use 0 to 65535. Received: {self.pre_kill_secs}"
            )
        if not 0 <= self.port < 65536:
            raise LaunchError(f"--port is not a port; use 1 to 65535, or 0 to derive it. Received: {self.port}")
        most = min(self.tasks_per_node, len(self.shape.tasks))
        if not self.port and most > MOST_WITHOUT_PORT:
            raise LaunchError(
                f"--port has to be given for more than {MOST_WITHOUT_PORT} tasks on one host, such as --port=20000. "
                f"Received: {most} tasks"
            )
        shape.check_duration("grace_period_secs", self.grace_secs)
        self._check_texts()
        slurm_job.check_limit(self.options.get("time", ""), self.extra, {}, self.pre_kill_secs)
        workers = min(self.tasks_per_node, len(self.shape.computing))
        if 0 < self.gpus_per_node < workers:
            raise LaunchError(
                f"--gpus_per_node leaves workers of a host without a GPU; use {workers} or more, or fewer "
                f"--tasks_per_node. Received: {self.gpus_per_node}"
            )

    def _check_texts(self) -> None:
        for flag, given, example in (("sbatch", self.extra, "--exclusive"), ("srun", self.srun, "--mpi=none")):
            for option in given:
                if not option.startswith("-"):
                    raise LaunchError(f"--{flag} is not an option; write --{flag}={example}. Received: {option!r}")
        for flag, text in (*self.options.items(), ("directory", self.directory), *(("sbatch", x) for x in self.extra)):
            if any(char in text for char in '\n\r\0"\\'):
                raise LaunchError(f"--{flag} has a character that a batch script can't hold. Received: {text!r}")
        for text in (*self.command, *self.env.values(), *self.srun, *self.setup):
            if "\0" in text:
                raise LaunchError(f"an argument has a zero byte, which no program can be given. Received: {text!r}")

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return math.ceil(len(self.shape.tasks) / self.tasks_per_node)

    def used(self, name: str) -> str:
        """Returns the value that sbatch uses for its option `partition` or `output`, in this environment."""
        return slurm_job.used_by_sbatch(name, self.options.get(name, ""), self.extra, os.environ)[0]


@dataclasses.dataclass(frozen=True)
class SlurmRequest:
    """A batch script."""

    text: str

    def __str__(self) -> str:
        return self.text


def plan(job: SlurmJob) -> SlurmRequest:
    """Returns the batch script that `submit` would pass to sbatch."""
    return SlurmRequest("\n".join(["#!/bin/bash", *_directives(job), "", _body(job)]))


@dataclasses.dataclass(frozen=True)
class _Component:
    """Hosts of one kind: one component of a heterogeneous Slurm job."""

    nodes: int
    ntasks: int
    gpus_per_node: int


def _components(job: SlurmJob) -> list[_Component]:
    """Returns the component of hosts with workers, then that of hosts without workers, on which GPUs would be idle."""
    ntasks, computing_nodes = len(job.shape.tasks), math.ceil(len(job.shape.computing) / job.tasks_per_node)
    if not job.gpus_per_node or computing_nodes == job.num_nodes:
        return [_Component(job.num_nodes, ntasks, job.gpus_per_node)]
    full = computing_nodes * job.tasks_per_node
    return [
        _Component(computing_nodes, full, job.gpus_per_node),
        _Component(job.num_nodes - computing_nodes, ntasks - full, 0),
    ]


def _directives(job: SlurmJob) -> list[str]:
    blocks = [_block(job, component) for component in _components(job)]
    return [line for number, block in enumerate(blocks) for line in (["#SBATCH hetjob"] * bool(number) + block)]


def _block(job: SlurmJob, component: _Component) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": str(component.nodes),
        "ntasks": str(component.ntasks),
        "ntasks-per-node": str(min(component.ntasks, job.tasks_per_node)),
        "cpus-per-task": str(job.cpus_per_task or ""),
        "gpus-per-node": str(component.gpus_per_node) if component.gpus_per_node else "",
        **{name: job.options.get(name, "") for name in _OPTIONS},
        "chdir": job.directory,
        "open-mode": "append",
        "signal": f"TERM@{job.pre_kill_secs}" if job.pre_kill_secs else "",
    }
    lines = [f"#SBATCH --{name}={_quoted(value)}" for name, value in options.items() if value]
    has_gpus = component.gpus_per_node or not job.gpus_per_node
    extra = [option for option in job.extra if has_gpus or not option.startswith(_GPU_OPTIONS)]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {_quoted(option)}" for option in extra)]


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else f'"{value}"'


def _body(job: SlurmJob) -> str:
    python = [job.python, "-P", "-m"]
    shape_flags = job.shape.arguments()
    limits = [f"--{name}={getattr(job, name)}" for name in ("max_restarts", "max_preemptions", "pre_kill_secs")]
    run = [*python, "tfdist.launchers.slurm.job", *shape_flags, *limits, f"--task_logs={job.task_logs}", "--"]
    components = range(len(_components(job)))
    tasks = (
        f"--ntasks={len(job.shape.tasks)}" if len(components) == 1 else f"--het-group={','.join(map(str, components))}"
    )
    srun = ["srun", tasks, *([f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else [])]
    options = ["--distribution=block", "--kill-on-bad-exit=1", "--unbuffered", *job.srun]
    port, grace = f"--port={job.port}", f"--grace_period_secs={job.grace_secs:g}"
    quiet = ["--quiet_workers"] * job.quiet_workers
    task = [*python, "tfdist.launchers.slurm.task", *shape_flags, port, grace, *quiet, "--", *job.command]
    exports = tools.shell_exports(job.env) + "".join(f"{line}\n" for line in job.setup)
    lines = " \\\n  ".join(map(shlex.join, (run, [*srun, *options], task)))
    return f"""\
{exports}# Starts the step, and queues the job again. Gets Slurm's signals in place of the shell.
exec {lines}
"""


def make_output_folders(job: SlurmJob) -> None:
    """Creates the folder of --output, and that in which --task_logs are made. Slurm creates none: output would be lost.

    Raises:
      LaunchError: a folder can't be created, or the one of --output depends on the job.
    """
    if job.task_logs and "%" not in (logs := str(pathlib.Path(job.directory, job.task_logs).parent)):
        make_folder("--task_logs", pathlib.Path(logs))
    output = job.used("output")
    folder = pathlib.Path(job.directory, output).parent
    if "%" in str(folder):
        raise LaunchError(
            f"--output has a folder with a %, and Slurm creates none; use one that exists. Received: {output!r}"
        )
    make_folder("--output", folder)


def cpus_of_nodes(job: SlurmJob, lines: Sequence[str]) -> int:
    """Returns the CPUs for each task, so that the tasks of a node share all of its CPUs: on whole cores, of the node
    with the fewest. Tasks that ask for some of the GPUs of a node get that part of its CPUs. Returns 0 without a node,
    or if one has fewer CPUs than tasks.

    Args:
      job: the job.
      lines: partition, CPUs, threads per core and GRES of each node; the default partition ends with an asterisk.
    """
    nodes = [node.groups() for line in lines if (node := _NODE.match(line))]
    if not job.used("partition"):
        nodes = [node for node in nodes if node[0].endswith("*")] or nodes
    found, tasks = [], min(job.tasks_per_node, len(job.shape.tasks))
    for _, cpus, threads, gres in nodes:
        cores, gpus = int(cpus) // int(threads), sum(map(int, _GPUS.findall(gres)))
        if 0 < job.gpus_per_node < gpus:
            cores = cores * job.gpus_per_node // gpus
        found.append(cores // tasks * int(threads) or cores * int(threads) // tasks)
    return min(found, default=0)


def with_cpus(job: SlurmJob) -> SlurmJob:
    """Returns the job with CPUs per task from its partition's nodes, unless others are set or Slurm refuses them."""
    variables = [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_HINT"))]
    options = (*job.extra, *job.srun, *(f"--{name.partition('_')[2].lower()}" for name in variables))
    is_set = job.cpus_per_task or any(map(_SETS_CPUS.match, options))
    if is_set or not all(map(shutil.which, ("sinfo", "sbatch"))):
        return job
    chosen = [f"--partition={job.used('partition')}"] if job.used("partition") else []
    try:
        text = tools.run_tool(["sinfo", "--noheader", "--Node", *chosen, "--format=%P %c %Z %G"])
        if cpus := cpus_of_nodes(job, text.splitlines()):
            sharing = dataclasses.replace(job, cpus_per_task=cpus)
            # Slurm may reserve CPUs of a node, or close some to the partition.
            tools.run_tool(["sbatch", "--test-only"], str(plan(sharing)))
            _log.say(f"--cpus_per_task={cpus}: the tasks of a node share its CPUs")
            return sharing
    except LaunchError as error:
        _log.say(f"--cpus_per_task is Slurm's default: {' '.join(str(error).split())}")
    return job


def submit(request: SlurmRequest, output: str = "slurm-%j.out") -> int:
    """Passes the script to sbatch and prints the job's id.

    Args:
      request: result of `plan`.
      output: the file of the job's output, for the line to copy.

    Returns:
      0 once the job is in the queue, and sbatch's exit code if it refuses the job: it says why on standard error. With
      its option --wait the exit code of the job, once it has ended.

    Raises:
      LaunchError: sbatch is not installed.
    """
    sbatch = tools.find_tool("sbatch", "call this on a login host of the cluster, or look at it with --dry_run")
    number, pipe = "", subprocess.PIPE
    # sbatch gives up a controller that does not answer by itself.
    with subprocess.Popen([sbatch, "--parsable"], stdin=pipe, stdout=pipe, encoding="utf-8") as process:
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as script:  # pyright: ignore[reportOptionalContextManager]
                script.write(request.text)
            if number := process.stdout.readline().strip().partition(";")[0]:
                sys.stdout.write(f"{number}\n")
                sys.stdout.flush()
                file = shlex.quote(output.replace("%j", number))
                shown = f"squeue --job={number}   shows it", f"tail -F {file}   follows its output"
                _log.say(f"submitted job {number}", *shown, f"scancel {number}   ends it")
            return shell_code(process.wait())
        except KeyboardInterrupt:
            process.kill()
    if number:
        _log.say(f"no longer waiting; job {number} goes on, scancel {number} ends it")
    return 128 + signal.SIGINT


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values)
    quiet_help = "write the output of the chief (and evaluator) alone, and the last lines of a task that fails"
    table = {
        "name": ("tfdist", "name of the job"),
        "partition": ("", "partition to run in"),
        "account": ("", "account to charge"),
        "qos": ("", "quality of service"),
        "time": ("", "time limit, such as 4:00:00"),
        "mem": ("", "memory of each host, such as 16G"),
        "constraint": ("", "features that the hosts must have"),
        "output": ("slurm-%j.out", "file for the output of all tasks"),
        "python": (sys.executable, "interpreter on the hosts"),
        "directory": ("", "working directory, shared by all hosts; the current one by default"),
        "tasks_per_node": (1, "tasks on each host"),
        "cpus_per_task": (0, "CPUs for each task; by default the tasks of a node share its CPUs"),
        "gpus_per_node": (0, "GPUs of each host, shared out among the workers there"),
        "max_restarts": (0, "restarts of a job that has failed"),
        "max_preemptions": (100, "restarts of a job that was preempted; not counted as failures"),
        "pre_kill_secs": (120, "seconds before the time limit at which the tasks get SIGTERM; 0 for none"),
        "port": (0, "first port of each host; 0 derives it from the job's number"),
        "grace_period_secs": (30.0, "seconds for the other tasks after one has failed"),
        "quiet_workers": (False, quiet_help),
        "task_logs": ("slurm-%j", "directory for files of each task's output; empty for none"),
        "env": ([], "NAME=VALUE for all tasks; may be repeated"),
        "sbatch": ([], "one more option of sbatch; may be repeated"),
        "srun": ([], "one more option of srun, such as --mpi=none; may be repeated"),
        "setup": ([], "shell line before the tasks, such as 'module load cuda'; may be repeated"),
        "dry_run": (False, "print the batch script, submit nothing"),
    }
    command_line.define(values, table)
    environment.define_flags(values)


def job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> SlurmJob:
    """Returns the job that the command line describes.

    Raises:
      LaunchError: the job is invalid.
    """
    same = ("name", "python", "tasks_per_node", "cpus_per_task", "gpus_per_node", "max_restarts", "pre_kill_secs")
    limits = ("max_preemptions", "port")
    return SlurmJob(
        tuple(command),
        Shape.from_flags(values),
        **{name: getattr(values, name) for name in (*same, *limits)},
        grace_secs=values.grace_period_secs,
        directory=values.directory or str(pathlib.Path.cwd()),
        env=environment.from_flags(values),
        quiet_workers=values.quiet_workers,
        task_logs=values.task_logs,
        options={name: getattr(values, name) for name in _OPTIONS},
        extra=tuple(values.sbatch),
        srun=tuple(values.srun),
        setup=tuple(values.setup),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch slurm`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = job_from_flags(values, command)
    slurm_job.check_limit(values.time, values.sbatch, os.environ, job.pre_kill_secs)
    check_folder("--directory", job.directory, "name one that all hosts share")
    check_command(job.command)
    job = with_cpus(job)
    request = plan(job)

    def start() -> int:
        make_output_folders(job)
        return submit(request, job.used("output"))

    return command_line.submit_or_show(values, request, start)
