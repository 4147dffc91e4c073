# SPDX-License-Identifier: Apache-2.0
"""Starts a script as every task of a cluster in a Slurm job.

`plan` renders the batch script, `submit` passes it to `sbatch`; a dry run prints it. Inside of the job,
`tfdist.launchers.slurm.task` determines each process' task from SLURM_*.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, requests, shape
from tfdist.launchers.requests import LaunchError, ToolError, make_folder, setting, shell_code, shell_join
from tfdist.launchers.shape import Job, Shape
from tfdist.launchers.slurm import job as slurm_job
from tfdist.launchers.slurm.task import MOST_WITHOUT_PORT, StepSettings

_USAGE = """\
usage: tfdist launch slurm [FLAGS] SCRIPT|-m MODULE [ARGUMENTS]

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
# Options of sbatch that set what the launcher does.
_IS_SHAPE = re.compile(r"--(array|nodes|ntasks)\b|-[aNn]")
# Beginnings of sbatch options that only hosts with GPUs get.
_GPU_OPTIONS = ("--gpu", "--gres", "--tres")
# Flags of the launcher that are options of sbatch under the same name, in the order of the #SBATCH lines.
_OPTIONS = ("partition", "account", "qos", "time", "mem", "constraint", "output")
# Letter of an option of sbatch, and its variable, which takes precedence over the #SBATCH lines of a batch script.
_OTHER_NAMES = {
    "time": ("t", "SBATCH_TIMELIMIT"),
    "partition": ("p", "SBATCH_PARTITION"),
    "output": ("o", "SBATCH_OUTPUT"),
}


@dataclasses.dataclass(frozen=True)
class SlurmJob(slurm_job.Limits, StepSettings, Job):
    """A Slurm job.

    Raises:
      LaunchError: a value is out of range, or can't be written into a batch script.
    """

    name: str = setting("tfdist", "name of the job")
    partition: str = setting("", "partition to run in")
    account: str = setting("", "account to charge")
    qos: str = setting("", "quality of service")
    time: str = setting("", "time limit, such as 4:00:00")
    mem: str = setting("", "memory of each host, such as 16G")
    constraint: str = setting("", "features that the hosts must have")
    output: str = setting("slurm-%j.out", "file for the output of all tasks")
    python: str = setting(sys.executable, "interpreter on the hosts")
    directory: str = setting("", "working directory, shared by all hosts; the current one by default")
    tasks_per_node: int = setting(1, "tasks on each host", least=1)
    cpus_per_task: int = setting(0, "CPUs for each task; by default the tasks of a node share its CPUs")
    gpus_per_node: int = setting(0, "GPUs of each host, shared out among the workers there")
    sbatch: tuple[str, ...] = setting((), "one more option of sbatch; may be repeated")
    srun: tuple[str, ...] = setting((), "one more option of srun, such as --mpi=none; may be repeated")
    setup: tuple[str, ...] = setting((), "shell line before the tasks, such as 'module load cuda'; may be repeated")

    def __post_init__(self) -> None:
        for flag in ("sbatch", "srun"):
            options = [each for given in getattr(self, flag) for each in re.split(" +(?=--?[A-Za-z])", given)]
            object.__setattr__(self, flag, tuple(options))
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--name is no name for a job; use up to 64 letters, digits, dots and dashes. Received: {self.name!r}"
            )
        most = min(self.tasks_per_node, len(self.shape.tasks))
        if not self.port and most > MOST_WITHOUT_PORT:
            raise LaunchError(
                f"--port has to be given for more than {MOST_WITHOUT_PORT} tasks on one host, such as --port=20000. "
                f"Received: {most} tasks"
            )
        self._check_texts()
        limit, source = self.used("time")
        secs = slurm_job.secs_of_limit(limit)
        if self.pre_kill_secs and secs is not None and secs <= self.pre_kill_secs:
            raise LaunchError(
                f"--time is not longer than --pre_kill_secs, so each run would get SIGTERM as it begins; use a "
                f"longer --time or a smaller --pre_kill_secs. Received: {source} ({secs} s) with "
                f"--pre_kill_secs={self.pre_kill_secs}"
            )
        workers = min(self.tasks_per_node, len(self.shape.computing))
        if 0 < self.gpus_per_node < workers:
            raise LaunchError(
                f"--gpus_per_node leaves workers of a host without a GPU; use {workers} or more, or fewer "
                f"--tasks_per_node. Received: {self.gpus_per_node}"
            )

    def _check_texts(self) -> None:
        command_line.check_options("sbatch", self.sbatch)
        command_line.check_options("srun", self.srun)
        if taken := [option for option in self.sbatch if _IS_SHAPE.match(option)]:
            raise LaunchError(
                "--sbatch can't change the tasks of a job, which is one cluster; use --num_workers and "
                f"--tasks_per_node, or submit it several times. Received: {taken[0]!r}"
            )
        texts = [(flag, getattr(self, flag)) for flag in (*_OPTIONS, "directory")]
        for flag, text in (*texts, *(("sbatch", option) for option in self.sbatch)):
            if any(char in text for char in '\n\r\0"\\'):
                raise LaunchError(f"--{flag} has a character that a batch script can't hold. Received: {text!r}")
        for text in (*self.command, *self.env.values(), *self.srun, *self.setup):
            if "\0" in text:
                raise LaunchError(f"an argument has a zero byte, which no program can be given. Received: {text!r}")

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return math.ceil(len(self.shape.tasks) / self.tasks_per_node)

    def used(self, name: str) -> tuple[str, str]:
        """Returns the value that sbatch uses for its option `time`, `partition` or `output`, and what sets it."""
        letter, variable = _OTHER_NAMES[name]
        found = (getattr(self, name), f"--{name}={getattr(self, name)}")
        # The options of --sbatch are later in the batch script.
        for option in self.sbatch:
            if matched := re.fullmatch(rf"(?:--{name}[= ]|-{letter} ?)(.*)", option):
                found = (matched[1], f"--sbatch={option}")
        value = os.environ.get(variable)
        return (value, f"{variable}={value}") if value else found


def plan(job: SlurmJob) -> str:
    """Returns the batch script that `submit` would pass to sbatch."""
    blocks = [_block(job, component) for component in _components(job)]
    directives = [line for number, block in enumerate(blocks) for line in (["#SBATCH hetjob"] * bool(number) + block)]
    return "\n".join(["#!/bin/bash", *directives, "", _body(job)])


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


def _block(job: SlurmJob, component: _Component) -> list[str]:
    options = {
        "job-name": job.name,
        "nodes": str(component.nodes),
        "ntasks": str(component.ntasks),
        "ntasks-per-node": str(min(component.ntasks, job.tasks_per_node)),
        "cpus-per-task": str(job.cpus_per_task or ""),
        "gpus-per-node": str(component.gpus_per_node) if component.gpus_per_node else "",
        **{name: getattr(job, name) for name in _OPTIONS},
        "chdir": job.directory,
        "open-mode": "append",
        "signal": f"TERM@{job.pre_kill_secs}" if job.pre_kill_secs else "",
    }
    lines = [f"#SBATCH --{name}={_quoted(value)}" for name, value in options.items() if value]
    has_gpus = component.gpus_per_node or not job.gpus_per_node
    extra = [option for option in job.sbatch if has_gpus or not option.startswith(_GPU_OPTIONS)]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {_quoted(option)}" for option in extra)]


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else f'"{value}"'


def _body(job: SlurmJob) -> str:
    python = [job.python, "-P", "-m"]
    shape_flags = job.shape.arguments()
    limits = [f"--{name}={getattr(job, name)}" for name in ("max_restarts", "max_preemptions", "pre_kill_secs")]
    run = [*python, "tfdist.launchers.slurm.job", *shape_flags, *limits, f"--task_logs={job.task_logs}", "--"]
    tasks = f"--ntasks={len(job.shape.tasks)}" if len(_components(job)) == 1 else "--het-group=0,1"
    srun = ["srun", tasks, *([f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else [])]
    options = ["--distribution=block", "--kill-on-bad-exit=1", "--unbuffered", *job.srun]
    port, grace = f"--port={job.port}", f"--grace_period_secs={job.grace_period_secs:g}"
    quiet = ["--quiet_workers"] * job.quiet_workers
    task = [*python, "tfdist.launchers.slurm.task", *shape_flags, port, grace, *quiet, "--", *job.command]
    before = [*(f"export {name}={shlex.quote(value)}" for name, value in job.env.items()), *job.setup]
    command = " \\\n  ".join(map(shell_join, (run, [*srun, *options], task)))
    note = "# Starts the step, and queues the job again. Gets Slurm's signals in place of the shell."
    return "".join(f"{line}\n" for line in (*before, note, f"exec {command}"))


def make_output_folders(job: SlurmJob) -> None:
    """Creates the folder of --output, and that in which --task_logs are made. Slurm creates none: output would be lost.

    Raises:
      LaunchError: a folder can't be created, or the one of --output depends on the job.
    """
    if job.task_logs and "%" not in (logs := str(pathlib.Path(job.directory, job.task_logs).parent)):
        make_folder("--task_logs", pathlib.Path(logs))
    output, _ = job.used("output")
    folder = pathlib.Path(job.directory, output).parent
    if "%" in str(folder):
        raise LaunchError(
            f"--output has a folder with a %, which Slurm does not create; use another. Received: {output!r}"
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
    if not job.used("partition")[0]:
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
    options = (*job.sbatch, *job.srun, *(f"--{name.partition('_')[2].lower()}" for name in variables))
    is_set = job.cpus_per_task or any(map(_SETS_CPUS.match, options))
    if is_set or not all(map(shutil.which, ("sinfo", "sbatch"))):
        return job
    partition, _ = job.used("partition")
    chosen = [f"--partition={partition}"] if partition else []
    refusal = ""
    try:
        nodes = requests.run_tool(["sinfo", "--noheader", "--Node", *chosen, "--format=%P %c %Z %G"])
        if cpus := cpus_of_nodes(job, nodes.splitlines()):
            sharing = dataclasses.replace(job, cpus_per_task=cpus)
            # Slurm may reserve CPUs of a node, or close some to the partition.
            refusal = f"sbatch refuses {cpus} of them"
            requests.run_tool(["sbatch", "--test-only"], plan(sharing))
            _log.say(f"--cpus_per_task={cpus}: the tasks of a node share its CPUs")
            return sharing
    except LaunchError as error:
        is_refused = isinstance(error, ToolError) and not error.is_late
        _log.say(f"--cpus_per_task is Slurm's default: {refusal if is_refused and refusal else error}")
    return job


def submit(text: str, output: str = "slurm-%j.out") -> int:
    """Passes the script to sbatch and prints the job's id.

    Args:
      text: result of `plan`.
      output: the file of the job's output, for the line to copy.

    Returns:
      0 once the job is in the queue, and sbatch's exit code if it refuses the job: it says why on standard error. With
      its option --wait the exit code of the job, once it has ended.
    """
    number, pipe = "", subprocess.PIPE
    # sbatch gives up a controller that does not answer by itself.
    with subprocess.Popen(["sbatch", "--parsable"], stdin=pipe, stdout=pipe, encoding="utf-8") as process:
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as script:  # pyright: ignore[reportOptionalContextManager]
                script.write(text)
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
    shape.define_flags(values, Shape, SlurmJob)


def job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> SlurmJob:
    """Returns the job that the command line describes.

    Raises:
      LaunchError: the job is invalid.
    """
    return shape.job_from_flags(SlurmJob, values, command, directory=values.directory or str(pathlib.Path.cwd()))


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    job = job_from_flags(values, command)
    requests.check_command(job.command)
    if not values.dry_run:
        if not pathlib.Path(job.directory).is_dir():
            raise LaunchError(f"--directory does not exist; name one that all hosts share. Received: {job.directory!r}")
        requests.find_tool("sbatch", "call this on a login host of the cluster, or look at it with --dry_run")
        make_output_folders(job)
    request = plan(with_cpus(job))
    return command_line.submit_or_show(values, request, lambda: submit(request, job.used("output")[0]))


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)
