# SPDX-License-Identifier: Apache-2.0
"""Environment variables that launchers give their tasks: communication, telemetry, TensorFlow's log, and GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from absl import flags

from tfdist.launchers.requests import LaunchError

AUTO, TENSORFLOW, MPI = KINDS = ("auto", "tensorflow", "mpi")
# Read by `MultiWorkerMirroredStrategy(communication="auto")`.
COMMUNICATION_VARIABLE = "TFDIST_COMMUNICATION"

# Read by every strategy: `fit` gets `tfdist.callbacks.Telemetry` with this directory, unless it has one.
TELEMETRY_VARIABLE = "TFDIST_TELEMETRY"

# Names of levels, and TensorFlow's numbers for them.
TF_LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
_LEVELS = {"info": "0", "warning": "1", "error": "2", "fatal": "3"}


def define_flags(values: flags.FlagValues, has_communication: bool = True) -> None:
    """Defines the flags that become variables of the tasks; without communication, of TPUs."""
    if has_communication:
        text = "library that sums tensors of CPUs over the workers of MultiWorkerMirroredStrategy"
        flags.DEFINE_enum("communication", AUTO, list(KINDS), text, flag_values=values)
    text = "directory for tfdist.callbacks.Telemetry of every fit; without a value, logs/ and the time"
    if not has_communication:
        text = "not for TPUs, whose strategy is TensorFlow's: use keras.callbacks.TensorBoard in the script"
    # absl lets flags of this kind go without a value, and with one it may be any text.
    flags.DEFINE_flag(
        flags.Flag(_Directory(), flags.ArgumentSerializer(), "telemetry", None, text, boolean=True), values
    )
    text = f"least level of TensorFlow's own messages; by default {TF_LOG_LEVEL_VARIABLE}, else warning"
    flags.DEFINE_enum("tf_log_level", None, [*_LEVELS, *_LEVELS.values()], text, flag_values=values)


class _Directory(flags.ArgumentParser):
    syntactic_help = "a directory, or nothing"

    def parse(self, argument: str) -> str | None:
        """Returns the directory. absl says "true" for a flag without a value, and "false" for --notelemetry."""
        if argument == "true":
            return time.strftime("logs/%Y%m%d-%H%M%S")
        return None if argument == "false" else argument


def tf_log_level_environment(chosen: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the tasks' variable for the flag's value, or by default for the level set in the launcher's `env`."""
    given = env.get(TF_LOG_LEVEL_VARIABLE) or _LEVELS["warning"]
    return {TF_LOG_LEVEL_VARIABLE: _LEVELS.get(chosen, chosen) if chosen is not None else given}


# What all of these flags add, and `--env`.

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables that launchers write for each task, and that of TPUs alone. Flags of their own set the others.
_OF_TASKS = "TF_CONFIG|TFDIST_(ATTEMPT|J|LAUNCHER|NOTICES|POD_|RAY_|SEND_|SLURM_|TASK_).*"
_OF_TPUS = f"{_OF_TASKS}|TPU_NAME|TPU_LOAD_LIBRARY"


def from_flags(values: flags.FlagValues) -> dict[str, str]:
    """Returns the variables that the flags add to the tasks' environment; a command line may lack some of the flags.

    Raises:
      LaunchError: a name of --env is invalid or the launcher's, or a name without a value is not set.
    """
    given, found = values.flag_values_dict(), dict[str, str]()
    if given.get("communication", AUTO) != AUTO:
        found[COMMUNICATION_VARIABLE] = given["communication"]
    if given.get("telemetry"):
        found[TELEMETRY_VARIABLE] = given["telemetry"]
    level = tf_log_level_environment(values.tf_log_level, os.environ)
    return found | level | _pairs(given.get("env", ()), _OF_TPUS if "gcloud" in given else _OF_TASKS)


def _pairs(settings: Sequence[str], taken: str) -> dict[str, str]:
    """Parses NAME=VALUE pairs; a NAME alone has its value in this process' environment."""
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise LaunchError(f"--env has no name of a variable; write --env=NAME=VALUE. Received: {setting!r}")
        if re.fullmatch(taken, name):
            raise LaunchError(f"--env can't replace a variable of the launcher's; leave it out. Received: --env={name}")
        if not equals and name not in os.environ:
            raise LaunchError(f"--env={name} takes the value from here, where it is not set; write --env={name}=VALUE")
        found[name] = value if equals else os.environ[name]
        if "\0" in found[name]:
            raise LaunchError(f"--env={name} has a zero byte, which no environment can hold; remove it")
    return found


# Finds the GPUs that a process may use, and divides them among several processes, without TensorFlow.

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIST_TIMEOUT_SECS = 20.0


def present(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES, whose inherited value is respected.

    Raises:
      LaunchError: nvidia-smi fails or hangs.
    """
    installed = _installed()
    if VISIBLE not in env:
        return [index for index, _ in installed]
    chosen: list[str] = []
    for name in filter(None, map(str.strip, env[VISIBLE].split(","))):
        # CUDA ends the list at the first unknown device, and accepts the beginning of a UUID.
        known = any(name == index or (uuid.startswith(name) and len(name) > 4) for index, uuid in installed)
        if not (known or name.startswith("MIG-")):
            break
        chosen.append(name)
    return chosen


def _installed() -> list[tuple[str, str]]:
    """Returns index and UUID of each GPU of this machine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_LIST_TIMEOUT_SECS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"nvidia-smi does not list the GPUs; mend the driver, or use --gpus_per_worker=0. Received: {error}"
        ) from None
    if done.returncode:
        return []  # The tool is installed, but there is no GPU; its message is of no use on a CPU.
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return [(index.strip(), uuid.strip()) for index, uuid in rows]


def divide_devices(
    devices: Sequence[str], tasks: int, each: int | None, place: str = "this machine", remedy: str = ""
) -> list[tuple[str, ...]]:
    """Divides devices among tasks; returns the devices of each task.

    Args:
      devices: the available devices.
      tasks: number of tasks that need devices.
      each: number of devices for each task; None divides all of them evenly.
      place: location of the devices, for the error message.
      remedy: remedy for fewer devices than tasks, for the error message.

    Raises:
      LaunchError: there are too few devices.
    """
    if each is None:
        each = len(devices) // tasks if tasks else 0
        if devices and not each:
            usual = f"use --num_workers={len(devices)}, or --gpus_per_worker=0 to train on the CPU"
            raise LaunchError(
                f"{tasks} workers need a GPU each, and there are fewer; {remedy or usual}. Received: "
                f"{len(devices)} GPUs on {place}"
            )
    if each * tasks > len(devices):
        raise LaunchError(
            f"--gpus_per_worker={each} needs {each * tasks} GPUs for {tasks} workers; use fewer. Received: "
            f"{len(devices)} GPUs on {place}"
        )
    return [tuple(devices[each * task : each * (task + 1)]) for task in range(tasks)]
