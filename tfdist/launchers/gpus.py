# SPDX-License-Identifier: Apache-2.0
"""Finds the GPUs that a process may use, and divides them among several processes, without TensorFlow."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tfdist.launchers.requests import LaunchError

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


def share(
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
