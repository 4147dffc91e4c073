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
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: an inherited choice is respected.

    Raises:
      LaunchError: the driver's own tool fails or hangs.
    """
    installed = _installed()
    if VISIBLE not in env:
        return [index for index, _ in installed]
    chosen: list[str] = []
    for name in filter(None, map(str.strip, env[VISIBLE].split(","))):
        # CUDA ends the list at the first device that it does not know, and takes the start of a UUID for it.
        known = any(name == index or (uuid.startswith(name) and len(name) > 4) for index, uuid in installed)
        if not (known or name.startswith("MIG-")):
            break
        chosen.append(name)
    return chosen


def _installed() -> list[tuple[str, str]]:
    """Index and UUID of each GPU of this machine."""
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
        return []  # The tool is there and no GPU is: what it says at that is not for the user of a CPU.
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return [(index.strip(), uuid.strip()) for index, uuid in rows]


def share(
    devices: Sequence[str], tasks: int, each: int | None, place: str = "this machine", remedy: str = ""
) -> list[tuple[str, ...]]:
    """Which devices each of several tasks gets.

    Args:
      devices: those that there are.
      tasks: how many tasks need some.
      each: devices for each task; None shares all of them out evenly.
      place: where the devices are, for the message.
      remedy: what to do where they are fewer than the tasks, for the message.

    Raises:
      LaunchError: there are not enough.
    """
    if each is None:
        each = len(devices) // tasks if tasks else 0
        if devices and not each:
            usual = f"use --num_workers={len(devices)}, or --gpus_per_worker=0 to train on the CPU"
            raise LaunchError(
                f"{tasks} workers can't share out fewer GPUs than they are; {remedy or usual}. Received: "
                f"{len(devices)} GPUs on {place}"
            )
    if each * tasks > len(devices):
        raise LaunchError(
            f"--gpus_per_worker={each} needs {each * tasks} GPUs for {tasks} workers; use fewer. Received: "
            f"{len(devices)} GPUs on {place}"
        )
    return [tuple(devices[each * task : each * (task + 1)]) for task in range(tasks)]
