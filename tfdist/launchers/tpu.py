# SPDX-License-Identifier: Apache-2.0
"""Starts a script on a TPU VM by `gcloud`.

TPUs are used through tf.distribute.TPUStrategy and need no TF_CONFIG: one program on the first host controls all chips.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, environment, shape, tools
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest, check_folder
from tfdist.launchers.supervise.attempts import run_tasks
from tfdist.launchers.supervise.output import LogSettings

_USAGE = """\
usage: tfdist launch tpu --accelerator_type=TYPE --zone=ZONE [FLAGS] SCRIPT [ARGUMENTS]

Runs SCRIPT on a TPU VM, on its first host only where it has several. SCRIPT builds its strategy by
tfdist.strategy_from_flags() with --tfdist_strategy=tpu, or a tf.distribute.TPUStrategy.
"""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*", re.ASCII)
_GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")
_CREATE_TIMEOUT_SECS = 3600.0


@dataclasses.dataclass(frozen=True)
class TpuJob:
    """A job on a TPU VM.

    Args:
      command: the script and its arguments, or "-m", a module and its arguments.
      accelerator_type: type of the TPU, such as v4-8.
      zone: zone of the TPU.
      name: name of the TPU.
      version: the runtime, such as tpu-ubuntu2204-base; for several hosts, one with TensorFlow's TPU server.
      project: the project; "" for the current one of gcloud.
      create: whether to create the TPU first.
      delete: whether to delete the TPU at the end, also after an error.
      spot: whether to use a spot TPU, which may be preempted at any time.
      copy: a local directory to copy to `directory` on all hosts; "" for none.
      directory: working directory of the script; relative to the home directory.
      setup: a shell command to run on all hosts first, such as "pip install -r requirements.txt"; "" for none.
      python: the interpreter.
      env: variables added to the environment.
      restarts: limits of restarts.

    Raises:
      LaunchError: a value is out of range.
    """

    command: tuple[str, ...]
    accelerator_type: str
    zone: str
    name: str = "tfdist"
    version: str = "tpu-ubuntu2204-base"
    project: str = ""
    create: bool = True
    delete: bool = False
    spot: bool = False
    copy: str = ""
    directory: str = "."
    setup: str = ""
    gcloud: tuple[str, ...] = ()
    python: str = "python3"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: Restarts = dataclasses.field(default_factory=Restarts)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--name is no name for a TPU; use up to 63 of a-z, 0-9 and dashes. Received: {self.name!r}"
            )
        for flag, example in (("accelerator_type", "v4-8"), ("zone", "us-central2-b")):
            if not getattr(self, flag):
                raise LaunchError(
                    f"--{flag} is missing; write the TPU's, such as --{flag}={example}. Received: nothing"
                )
        for flag in ("zone", "version", *(["project"] if self.project else [])):
            if not _WORD.fullmatch(getattr(self, flag)):
                raise LaunchError(f"--{flag} is malformed; see gcloud compute tpus. Received: {getattr(self, flag)!r}")
        if self.slice.hosts > 1 and self.create and "-pod" not in self.version:
            raise LaunchError(
                f"--version is no runtime for {self.slice.hosts} hosts; use tpu-vm-tf-VERSION-pod-pjrt for your "
                f"TensorFlow (gcloud compute tpus versions list shows all). Received: {self.version!r}"
            )

    @property
    def slice(self) -> Slice:
        """Number of chips and hosts of the TPU."""
        return from_type(self.accelerator_type)


@dataclasses.dataclass(frozen=True)
class TpuRequest:
    """The commands of a job in their order: before the script, the script, and after it (also after an error)."""

    before: tuple[tuple[str, ...], ...]
    script: tuple[str, ...]
    after: tuple[tuple[str, ...], ...]
    restarts: Restarts

    def __str__(self) -> str:
        return "".join(f"{shlex.join(command)}\n" for command in (*self.before, self.script, *self.after))


def plan(job: TpuJob) -> TpuRequest:
    """Returns the gcloud commands that `submit` would run."""
    where = (f"--zone={job.zone}", *([f"--project={job.project}"] if job.project else []))
    before: list[tuple[str, ...]] = []
    if job.create:
        kind = (f"--accelerator-type={job.accelerator_type}", f"--version={job.version}")
        before.append((*_GCLOUD, "create", job.name, *where, *kind, *(["--spot"] if job.spot else []), *job.gcloud))
    if job.copy:
        before.append((*_GCLOUD, "scp", "--recurse", job.copy, f"{job.name}:{job.directory}", *where, "--worker=all"))
    if job.setup:
        before.append((*_GCLOUD, "ssh", job.name, *where, "--worker=all", f"--command={job.setup}"))
    # With a terminal, so that the script gets SIGHUP when the connection ends.
    script = (*_GCLOUD, "ssh", job.name, *where, "--worker=0", "--ssh-flag=-tt", f"--command={_remote(job)}")
    after = ((*_GCLOUD, "delete", job.name, *where, "--quiet"),) if job.delete else ()
    return TpuRequest(tuple(before), script, after, job.restarts)


def _remote(job: TpuJob) -> str:
    """Returns the shell command for the first host."""
    env = {"PYTHONUNBUFFERED": "1", "TFDIST_LAUNCHER": "tpu", **job.env}
    # With several hosts the runtime of each host owns its chips, and TensorFlow finds them by the TPU's name.
    env |= {"TPU_NAME": job.name, "TPU_LOAD_LIBRARY": "0"} if job.slice.hosts > 1 else {"TPU_NAME": "local"}
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"cd {shlex.quote(job.directory)} && env {settings} {shlex.join([job.python, *job.command])}"


def submit(request: TpuRequest, logs: LogSettings) -> int:
    """Runs the commands; those after the script also run after an error.

    Returns:
      The exit code of the script.

    Raises:
      LaunchError: gcloud is not installed, or fails before the script.
    """
    tools.find_tool("gcloud", "install the Google Cloud CLI, or look at the commands with --dry_run")
    # SIGTERM raises KeyboardInterrupt like Ctrl-C, so that the TPU is still deleted.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for command in request.before:
            _log.say(shlex.join(command))
            tools.run_tool(command, timeout_secs=_CREATE_TIMEOUT_SECS)
        task = TaskRequest("tpu", {}, request.script)
        return run_tasks(Request((task,), frozenset({"tpu"}), 10.0, request.restarts), logs)
    finally:
        signal.signal(signal.SIGTERM, before)
        for command in request.after:
            _log.say(shlex.join(command))
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_CREATE_TIMEOUT_SECS, check=False)
            if done.returncode:
                _log.say(f"that failed, and the TPU may go on costing money: {shlex.join(command)}")


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    table = {
        "accelerator_type": ("", "such as v4-8"),
        "zone": ("", "zone of the TPU"),
        "project": ("", "project; by default the current one of gcloud"),
        "version": ("tpu-ubuntu2204-base", "runtime"),
        "name": ("tfdist", "name of the TPU"),
        "create": (True, "make the TPU first"),
        "delete": (False, "delete the TPU at the end, whatever happens"),
        "spot": (False, "may be preempted at any time"),
        "copy": ("", "local directory to copy to --working_dir on all hosts"),
        "setup": ("", "shell command for all hosts before the script"),
        "gcloud": ([], "one more option of gcloud's create, such as --network=mine; may be repeated"),
        "python": ("python3", "interpreter on the hosts"),
        "working_dir": (".", "where the script runs; relative to the home directory"),
        "max_restarts": (3, "failures that the job may have; preemptions don't count"),
        "env": ([], "NAME=VALUE for the script; may be repeated"),
        "dry_run": (False, "print the commands, run nothing"),
    }
    command_line.define(values, table)
    environment.define_flags(values, has_communication=False)


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch tpu`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    if values.telemetry:
        raise LaunchError(
            "--telemetry measures workers of tfdist's strategies, and TPUs have TensorFlow's, whose chips compute in "
            f"lockstep; use keras.callbacks.TensorBoard in the script. Received: --telemetry={values.telemetry}"
        )
    if values.copy:
        check_folder("--copy", values.copy, "name a directory of this machine")
    request = plan(_job_from_flags(values, command))
    return command_line.submit_or_show(values, request, lambda: submit(request, LogSettings()))


def _job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> TpuJob:
    shape.check_count("max_restarts", values.max_restarts)
    same = ("accelerator_type", "zone", "name", "version", "project", "create", "delete", "spot", "copy", "setup")
    return TpuJob(
        tuple(command),
        **{name: getattr(values, name) for name in same},
        python=values.python,
        directory=values.working_dir,
        gcloud=tuple(values.gcloud),
        env=environment.from_flags(values),
        restarts=Restarts(values.max_restarts),
    )


# Computes the numbers of chips and hosts of a TPU slice from its type.
#
# Source: Google's page "TPU versions". The number in a type counts TensorCores (two per chip) up to v4 and for v5p, and
# chips for v5e and v6e.


_CHIPS_PER_HOST, _MAX_CHIPS = 4, 16384
_CORES_PER_UNIT = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}
# Numbers of chips of the slices with one host, where the number in a type counts chips.
_SINGLE_HOSTS = (1, 4, 8)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: number of its chips, and number of its hosts."""

    chips: int
    hosts: int


def from_type(text: str) -> Slice:
    """Returns the slice of a Cloud TPU type, such as v4-32 or v5litepod-16.

    Raises:
      LaunchError: there is no such type.
    """
    name, _, number = text.rpartition("-")
    if name not in _CORES_PER_UNIT or not (number.isascii() and number.isdigit() and 0 < len(number) < 6):
        known = ", ".join(f"{each}-N" for each in _CORES_PER_UNIT)
        raise LaunchError(f"--accelerator_type is not known; use one of {known}. Received: {text!r}")
    cores = _CORES_PER_UNIT[name]
    chips, rest = divmod(int(number), cores)
    if rest or not chips:
        raise LaunchError(f"--accelerator_type has no such size: {name} counts 2 cores a chip. Received: {text!r}")
    if cores == 1 and chips in _SINGLE_HOSTS:
        return Slice(chips, 1)
    if chips > _MAX_CHIPS or chips % _CHIPS_PER_HOST:
        raise LaunchError(
            f"--accelerator_type={text} makes no whole hosts of {_CHIPS_PER_HOST} chips; use a type that exists. "
            f"Received: {chips} chips"
        )
    return Slice(chips, chips // _CHIPS_PER_HOST)
