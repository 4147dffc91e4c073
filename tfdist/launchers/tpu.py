# SPDX-License-Identifier: Apache-2.0
"""Starts a script on TPUs: on a TPU VM by `gcloud`, or in a GKE node pool by `kubectl`.

TPUs are used through tf.distribute.TPUStrategy and need no TF_CONFIG: one program on the first host controls all chips.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist import _log
from tfdist.launchers import command_line, environment, shape, tools
from tfdist.launchers.kubernetes import launcher as kubernetes
from tfdist.launchers.kubernetes import manifests
from tfdist.launchers.kubernetes.launcher import KubernetesRequest
from tfdist.launchers.kubernetes.manifests import Pods
from tfdist.launchers.requests import LaunchError, Request, Restarts, TaskRequest
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.attempts import run_tasks
from tfdist.launchers.supervise.output import LogSettings

_USAGE = """\
usage: tfdist launch tpu --accelerator_type=TYPE --zone=ZONE [FLAGS] SCRIPT [ARGUMENTS]
       tfdist launch tpu --gke --accelerator=NAME --topology=TOPOLOGY --image=IMAGE [FLAGS] SCRIPT [ARGUMENTS]

Runs SCRIPT on TPUs: on a TPU VM, on its first host only where it has several; or in a GKE node pool. SCRIPT builds its
strategy by tfdist.strategy_from_flags() with --tfdist_strategy=tpu, or a tf.distribute.TPUStrategy.

flags (also from a file, with --flagfile=FILE):
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
    python: str = "python3"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: Restarts = dataclasses.field(default_factory=Restarts)

    def __post_init__(self) -> None:
        if not self.command:
            raise LaunchError("there is no script to run; name one after the flags. Received: nothing")
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--name is no name for a TPU; use up to 63 of a-z, 0-9 and dashes. Received: {self.name!r}"
            )
        for flag in ("zone", "version", *(["project"] if self.project else [])):
            if not _WORD.fullmatch(getattr(self, flag)):
                raise LaunchError(
                    f"--{flag} is missing or malformed; see gcloud compute tpus. Received: {getattr(self, flag)!r}"
                )
        _ = self.slice

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
        before.append((*_GCLOUD, "create", job.name, *where, *kind, *(["--spot"] if job.spot else [])))
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


def plan_gke(pods: Pods, accelerator: str, topology: str, chips_per_host: int = 0) -> KubernetesRequest:
    """Returns the Job that runs the script in a GKE node pool.

    Args:
      pods: the job; accelerators and node selectors are added here.
      accelerator: the label cloud.google.com/gke-tpu-accelerator.
      topology: the label cloud.google.com/gke-tpu-topology.
      chips_per_host: number of chips of the machine type; 0 for the usual number.

    Raises:
      LaunchError: the topology is invalid, or has several hosts.
    """
    tpus = from_topology(accelerator, topology, chips_per_host)
    if tpus.hosts > 1:
        raise LaunchError(
            f"--topology has {tpus.hosts} hosts, and GKE has no runtime that gives TensorFlow the chips of other "
            f"hosts; use a topology of one host, or a TPU VM (without --gke). Received: {topology!r}"
        )
    labels = {"cloud.google.com/gke-tpu-accelerator": accelerator, "cloud.google.com/gke-tpu-topology": topology}
    pods = dataclasses.replace(
        pods,
        shape=Shape(1),
        accelerators={"google.com/tpu": tpus.chips},
        node_selector={**pods.node_selector, **labels},
        env={**pods.env, "PYTHONUNBUFFERED": "1", "TFDIST_LAUNCHER": "tpu", "TPU_NAME": "local"},
    )
    kubernetes.check_pods(pods)
    job = manifests.plain_job(pods, "worker", tpus.hosts, (pods.python, *pods.command))
    return KubernetesRequest((manifests.network_policy(pods), job), pods)


def define_flags(values: flags.FlagValues) -> None:
    """Defines this platform's flags."""
    flags.DEFINE_boolean("gke", False, "run in a GKE node pool, not on a TPU VM", flag_values=values)
    texts = {
        "accelerator_type": ("", "TPU VM: such as v4-8"),
        "zone": ("", "TPU VM: zone"),
        "project": ("", "TPU VM: project; by default the current one of gcloud"),
        "version": ("tpu-ubuntu2204-base", "TPU VM: runtime"),
        "copy": ("", "TPU VM: local directory to copy to --working_dir on all hosts"),
        "setup": ("", "TPU VM: shell command for all hosts before the script"),
        "accelerator": ("", "GKE: such as tpu-v5-lite-podslice"),
        "topology": ("", "GKE: such as 2x4"),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    flags.DEFINE_integer("chips_per_host", 0, "GKE: chips of the machine type; 0 for the usual", flag_values=values)
    flags.DEFINE_boolean("create", True, "TPU VM: make the TPU first", flag_values=values)
    flags.DEFINE_boolean("delete", False, "TPU VM: delete the TPU at the end, whatever happens", flag_values=values)
    flags.DEFINE_boolean("spot", False, "TPU VM: may be preempted at any time", flag_values=values)
    kubernetes.define_pod_flags(values)
    environment.define_telemetry_flag(values)


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist launch tpu`. See `command_line.run_command`."""
    return command_line.run_command(_USAGE, define_flags, arguments, _launch)


def _launch(values: flags.FlagValues, command: Sequence[str]) -> int:
    if values.telemetry:
        raise LaunchError(
            "--telemetry measures workers of tfdist's strategies, and TPUs have TensorFlow's, whose chips compute in "
            f"lockstep; use keras.callbacks.TensorBoard in the script. Received: --telemetry={values.telemetry}"
        )
    if values.gke:
        pods = kubernetes.pods_from_flags(values, command, Shape(1))
        request = plan_gke(pods, values.accelerator, values.topology, values.chips_per_host)
        start = functools.partial(kubernetes.submit, request, values.start_timeout_secs)
    else:
        request = plan(_job_from_flags(values, command))
        start = functools.partial(submit, request, LogSettings())
    return command_line.submit_or_show(values, request, start)


def _job_from_flags(values: flags.FlagValues, command: Sequence[str]) -> TpuJob:
    shape.check_count("max_restarts", values.max_restarts)
    same = (
        "accelerator_type",
        "zone",
        "name",
        "version",
        "project",
        "create",
        "delete",
        "spot",
        "copy",
        "setup",
        "python",
    )
    return TpuJob(
        tuple(command),
        **{name: getattr(values, name) for name in same},
        directory=values.working_dir or ".",
        env=environment.from_flags(values),
        restarts=Restarts(values.max_restarts),
    )


# Computes the numbers of chips and hosts of a TPU slice from its type or topology.
#
# Source: Google's pages "TPU versions" and "Plan TPUs in GKE". The number in a type counts TensorCores (two per chip)
# up to v4 and for v5p, and chips for v5e and v6e.


@dataclasses.dataclass(frozen=True)
class _Generation:
    """Properties of one generation of TPU chips.

    Attributes:
      cores_per_unit: cores per chip if the number in a type counts cores; 1 if it counts chips.
      dimensions: number of dimensions of a topology.
      chips_per_host: number of chips per host in a slice of several hosts.
      single: numbers of chips of the slices with one host.
    """

    cores_per_unit: int
    dimensions: int
    chips_per_host: int
    single: tuple[int, ...]


_V4 = _Generation(cores_per_unit=2, dimensions=3, chips_per_host=4, single=(4,))
_LITE = _Generation(cores_per_unit=1, dimensions=2, chips_per_host=4, single=(1, 4, 8))
_TYPES = {
    "v2": _Generation(cores_per_unit=2, dimensions=2, chips_per_host=4, single=(4,)),
    "v3": _Generation(cores_per_unit=2, dimensions=2, chips_per_host=4, single=(4,)),
    "v4": _V4,
    "v5p": _V4,
    "v5litepod": _LITE,
    "v6e": _LITE,
}
# Generations by GKE's names, in the label cloud.google.com/gke-tpu-accelerator of a node pool.
_ACCELERATORS = {
    "tpu-v4-podslice": _V4,
    "tpu-v5p-slice": _V4,
    "tpu-v5-lite-podslice": _LITE,
    "tpu-v6e-slice": _LITE,
}
_MAX_CHIPS = 16384
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: number of its chips, and number of its hosts."""

    chips: int
    hosts: int

    @property
    def chips_per_host(self) -> int:
        """Number of chips of each host."""
        return self.chips // self.hosts


def from_type(text: str) -> Slice:
    """Returns the slice of a Cloud TPU type, such as v4-32 or v5litepod-16.

    Raises:
      LaunchError: there is no such type.
    """
    name, _, number = text.rpartition("-")
    if name not in _TYPES or not (number.isascii() and number.isdigit() and 0 < len(number) < 6):
        known = ", ".join(f"{each}-N" for each in _TYPES)
        raise LaunchError(f"--accelerator_type is not known; use one of {known}. Received: {text!r}")
    generation = _TYPES[name]
    chips, rest = divmod(int(number), generation.cores_per_unit)
    if rest or not chips:
        raise LaunchError(f"--accelerator_type has no such size: {name} counts 2 cores a chip. Received: {text!r}")
    return _slice(generation, chips, f"--accelerator_type={text}")


def from_topology(accelerator: str, topology: str, chips_per_host: int = 0) -> Slice:
    """Returns the slice of a GKE node pool with this topology.

    Args:
      accelerator: the label cloud.google.com/gke-tpu-accelerator.
      topology: the label cloud.google.com/gke-tpu-topology, such as 2x2x2.
      chips_per_host: number of chips of the machine type; 0 for the usual number.

    Raises:
      LaunchError: there is no such accelerator or topology.
    """
    if accelerator not in _ACCELERATORS:
        raise LaunchError(
            f"--accelerator is not known; use one of {', '.join(_ACCELERATORS)}. Received: {accelerator!r}"
        )
    generation = _ACCELERATORS[accelerator]
    parts = topology.split("x")
    if not _TOPOLOGY.fullmatch(topology) or len(parts) != generation.dimensions:
        example = "x".join("224"[: generation.dimensions])
        raise LaunchError(
            f"--topology is invalid for {accelerator}, which has {generation.dimensions} dimensions; write {example}. "
            f"Received: {topology!r}"
        )
    return _slice(generation, math.prod(map(int, parts)), f"--topology={topology}", chips_per_host)


def _slice(generation: _Generation, chips: int, what: str, chips_per_host: int = 0) -> Slice:
    usual = chips if chips in generation.single else generation.chips_per_host
    each = chips_per_host or usual
    if chips > _MAX_CHIPS or chips % each or each not in (1, 4, 8) or (each == 8 and chips > each):
        raise LaunchError(
            f"{what} makes no whole hosts of {each} chips; use a topology that exists, or another --chips_per_host. "
            f"Received: {chips} chips"
        )
    return Slice(chips, chips // each)
