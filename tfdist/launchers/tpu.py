# SPDX-License-Identifier: Apache-2.0
"""Starts a script on a TPU VM by `gcloud`.

TPUs are used through tf.distribute.TPUStrategy and need no TF_CONFIG: one program on the first host controls all chips.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, requests, shape
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest, setting, shell_join
from tfdist.launchers.supervise.attempts import run_tasks
from tfdist.launchers.supervise.output import LogSettings

_USAGE = """\
usage: tfdist launch tpu --accelerator_type=TYPE --zone=ZONE [FLAGS] SCRIPT [ARGUMENTS]

Runs SCRIPT on a TPU VM, on its first host only where it has several. SCRIPT builds its strategy by
tfdist.strategy_from_flags() with --tfdist_strategy=tpu, or a tf.distribute.TPUStrategy.
"""
_GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")
_CREATE_TIMEOUT_SECS = 3600.0
# Number in the type of a TPU with one host, and for each of several hosts.
_ONE_HOST, _SEVERAL = 8, {"v2": 8, "v3": 8, "v4": 8, "v5p": 8, "v5litepod": 4, "v6e": 4}
# Runtimes without a framework. Source: Google's page "TPU software versions".
_RUNTIMES = {"v5litepod": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}


@dataclasses.dataclass(frozen=True)
class TpuJob:
    """A job on a TPU VM: the script with its arguments, or "-m", a module and its arguments.

    Raises:
      LaunchError: a value is out of range.
    """

    command: tuple[str, ...]
    accelerator_type: str = setting("", "such as v4-8")
    zone: str = setting("", "zone of the TPU")
    project: str = setting("", "project; by default the current one of gcloud")
    version: str = setting(
        "", "runtime; for several hosts, one with TensorFlow's TPU server; by default that of the type"
    )
    name: str = setting("tfdist", "name of the TPU")
    create: bool = setting(True, "make the TPU first")
    delete: bool = setting(False, "delete the TPU at the end, whatever happens")
    spot: bool = setting(False, "may be preempted at any time")
    copy: str = setting("", "local directory or file to copy to --working_dir on all hosts")
    setup: str = setting("", "shell command for all hosts before the script")
    gcloud: tuple[str, ...] = setting((), "one more option of gcloud's create, such as --network=mine; may be repeated")
    python: str = setting("python3", "interpreter on the hosts")
    working_dir: str = setting(".", "where the script runs; relative to the home directory")
    max_restarts: int = setting(3, "failures that the job may have; preemptions don't count")
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for flag, example in (("accelerator_type", "v4-8"), ("zone", "us-central2-b")):
            if not getattr(self, flag):
                raise LaunchError(f"--{flag} is missing; write it, such as --{flag}={example}. Received: nothing")
        command_line.check_options("gcloud", self.gcloud)
        kind, _, number = self.accelerator_type.rpartition("-")
        if kind not in _SEVERAL or not number.isdecimal():
            if self.create:
                raise LaunchError(
                    f"--accelerator_type is not known; write one such as {', '.join(f'{kind}-8' for kind in _SEVERAL)} "
                    f"(v5e is v5litepod), or make the TPU with gcloud and add --nocreate. Received: "
                    f"{self.accelerator_type!r}"
                )
            _log.say(f"--accelerator_type={self.accelerator_type} is not known here: taken as one host")
        if not self.version:
            object.__setattr__(self, "version", _RUNTIMES.get(kind, "tpu-ubuntu2204-base"))
        if self.num_hosts > 1 and self.create and "-pod" not in self.version:
            raise LaunchError(
                f"--version is no runtime for {self.num_hosts} hosts; use tpu-vm-tf-VERSION-pod-pjrt for your "
                f"TensorFlow (gcloud compute tpus versions list shows all). Received: {self.version!r}"
            )

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the TPU, 1 for a type that is not known here.

        Source: Google's page "TPU versions". The number in a type counts TensorCores (two per chip) up to v4 and for
        v5p, and chips for v5e and v6e, of which up to eight are on one host.
        """
        name, _, number = self.accelerator_type.rpartition("-")
        size = int(number) if number.isdecimal() and name in _SEVERAL else 0
        return size // _SEVERAL[name] if size > _ONE_HOST else 1


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
        before.append((*_GCLOUD, "scp", "--recurse", job.copy, f"{job.name}:{job.working_dir}", *where, "--worker=all"))
    if job.setup:
        before.append((*_GCLOUD, "ssh", job.name, *where, "--worker=all", f"--command={job.setup}"))
    # With a terminal, so that the script gets SIGHUP when the connection ends.
    script = (*_GCLOUD, "ssh", job.name, *where, "--worker=0", "--ssh-flag=-tt", f"--command={_remote(job)}")
    after = ((*_GCLOUD, "delete", job.name, *where, "--quiet"),) if job.delete else ()
    return TpuRequest(tuple(before), script, after, Restarts(job.max_restarts))


def _remote(job: TpuJob) -> str:
    """Returns the shell command for the first host."""
    env = {"PYTHONUNBUFFERED": "1", "TFDIST_LAUNCHER": "tpu", **job.env}
    # With several hosts the runtime of each host owns its chips, and TensorFlow finds them by the TPU's name.
    env |= {"TPU_NAME": job.name, "TPU_LOAD_LIBRARY": "0"} if job.num_hosts > 1 else {"TPU_NAME": "local"}
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"cd {shell_join([job.working_dir])} && env {settings} {shell_join([job.python, *job.command])}"


def submit(request: TpuRequest, logs: LogSettings) -> int:
    """Runs the commands; those after the script also run after an error.

    Returns:
      The exit code of the script.

    Raises:
      LaunchError: gcloud is not installed, or fails before the script.
    """
    requests.find_tool("gcloud", "install the Google Cloud CLI, or look at the commands with --dry_run")
    # These raise KeyboardInterrupt like Ctrl-C, so that the TPU is still deleted; nohup has SIGHUP ignored.
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before, after = {each: signal.signal(each, signal.default_int_handler) for each in signals}, request.after
    try:
        for command in request.before:
            _log.say(shlex.join(command))
            try:
                requests.run_tool(command, timeout_secs=_CREATE_TIMEOUT_SECS)
            except requests.ToolError as error:
                if "create" in command and re.search("already.exists", str(error), re.IGNORECASE):
                    after = ()  # It is another job's.
                raise
        task = TaskRequest("tpu", {}, request.script)
        return run_tasks(Request((task,), frozenset({"tpu"}), 10.0, request.restarts), logs)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for command in after:
            _log.say(shlex.join(command))
            code: int | None = None
            try:
                # A second Ctrl-C ends this program, and not that one.
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, timeout=_CREATE_TIMEOUT_SECS, start_new_session=True
                ).returncode
            finally:
                if code != 0:
                    _log.say(f"that failed, and the TPU may go on costing money: {shlex.join(command)}")


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    shape.define_flags(values, TpuJob, has_communication=False)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    if values.telemetry:
        raise LaunchError(
            "--telemetry measures workers of tfdist's strategies, and TPUs have TensorFlow's, whose chips compute in "
            f"lockstep; use keras.callbacks.TensorBoard in the script. Received: --telemetry={values.telemetry}"
        )
    if values.copy and not pathlib.Path(values.copy).exists():
        raise LaunchError(f"--copy does not exist; name a directory or file of this machine. Received: {values.copy!r}")
    request = plan(shape.job_from_flags(TpuJob, values, command))
    return command_line.submit_or_show(values, request, lambda: submit(request, LogSettings()))


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_launch)
