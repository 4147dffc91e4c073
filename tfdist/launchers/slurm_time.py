# SPDX-License-Identifier: Apache-2.0
"""Parser of Slurm's time limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from tfdist.launchers.requests import LaunchError

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+)", re.ASCII)
_MINUTES = re.compile(r"\d+", re.ASCII)
_OPTION = re.compile(r"(?:--time[= ]|-t ?)(.*)")
# Environment variable of sbatch, which takes precedence over the #SBATCH lines of a batch script.
LIMIT_VARIABLE = "SBATCH_TIMELIMIT"


def limit_secs(text: str) -> int | None:
    """Returns a time limit in seconds; None for no limit, and for text that Slurm refuses, too.

    Args:
      text: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" or
        "days-hours:minutes:seconds". Slurm rounds up to whole minutes.
    """
    text = text.strip()
    if _MINUTES.fullmatch(text):
        secs = int(text) * 60
    elif found := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        secs = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif found := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        secs = (hours * 60 + minutes) * 60 + seconds
    else:
        return None
    return math.ceil(secs / 60) * 60 or None


def effective_limit(time: str, extra: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Returns the time limit that sbatch uses, and the flag or variable that sets it.

    Args:
      time: value of --time.
      extra: values of --sbatch, which are later in the batch script.
      env: the environment of sbatch.
    """
    found = (time, f"--time={time}")
    for option in extra:
        if matched := _OPTION.fullmatch(option):
            found = (matched[1], f"--sbatch={option}")
    if env.get(LIMIT_VARIABLE):
        found = (env[LIMIT_VARIABLE], f"{LIMIT_VARIABLE}={env[LIMIT_VARIABLE]}")
    return found


def check_limit(time: str, extra: Sequence[str], env: Mapping[str, str], pre_kill_secs: int) -> None:
    """Checks that the time limit is longer than `pre_kill_secs`.

    Raises:
      LaunchError: each run would get SIGTERM as soon as it starts.
    """
    limit, text = effective_limit(time, extra, env)
    secs = limit_secs(limit)
    if pre_kill_secs and secs is not None and secs <= pre_kill_secs:
        raise LaunchError(
            f"--time is not longer than --pre_kill_secs, so each run would get SIGTERM as it begins; use a "
            f"longer --time or a smaller --pre_kill_secs. Received: {text} ({secs} s) with "
            f"--pre_kill_secs={pre_kill_secs}"
        )
