# SPDX-License-Identifier: Apache-2.0
"""Describes a job as processes, in text and numbers: the same for every platform."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

# A script that was preempted and has saved its work ends with this code (EX_TEMPFAIL of sysexits.h: "try again later").
# Launchers start the job again and don't count it as a failure.
PREEMPTED_EXIT_CODE = 75
# A task that misses another one ends with 75, often before the task that failed has ended. The verdict waits so long.
CAUSE_SECS = 5.0
# Exit codes after which trying again is of no use: a command line that makes no sense, a program that can't be run.
HOPELESS_EXIT_CODES = (2, 126, 127)
# A task's variables on another host travel in the environment of what connects to it, their names after this prefix.
SENT_PREFIX = "TFDIST_SEND_"
_MAX_BACKOFF_DOUBLINGS = 6


class LaunchError(ValueError):
    """A job that can't be started. The message is one line."""


class ToolError(LaunchError):
    """A tool such as sbatch or kubectl has refused it."""


@dataclasses.dataclass(frozen=True)
class TaskRequest:
    """One process.

    Attributes:
      name: such as "worker:1".
      env: what is added to the environment.
      command: program and arguments.
      host: the other machine on which the task itself runs; "" for this one.
      probe: a command that succeeds if that host can be reached.
    """

    name: str
    env: Mapping[str, str]
    command: tuple[str, ...]
    host: str = ""
    probe: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return f"# {self.name}\n{settings} {shlex.join(self.command)}\n"


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often tasks are started again: all of them, or a worker alone.

    Args:
      max_restarts: of all tasks, after a failure.
      backoff_secs: time before the first of these; it doubles each time, up to 64-fold.
      max_preemptions: of all tasks, after one has ended with `PREEMPTED_EXIT_CODE`, which is no failure.
      max_worker_restarts: how often a worker that fails again and again is started again, before it is given up.
      min_workers: with how many workers the job goes on where some are given up; all by default.
      settled_secs: a worker that has run for so long had come back: its next failure is the first in a row.

    Raises:
      LaunchError: a number is out of range.
    """

    max_restarts: int = 0
    backoff_secs: float = 1.0
    max_preemptions: int = 100
    max_worker_restarts: int = 3
    min_workers: int | None = None
    # TensorFlow takes up to 20 s to import where several tasks do it at once, and ssh 15 s to say that a host is gone.
    settled_secs: float = 30.0

    def __post_init__(self) -> None:
        for flag in ("max_restarts", "max_preemptions", "max_worker_restarts"):
            if getattr(self, flag) < 0:
                raise LaunchError(f"--{flag} is too small; use 0 for none. Received: {getattr(self, flag)}")
        if not 0 <= self.backoff_secs < math.inf:
            raise LaunchError(f"--restart_backoff_secs is not a duration; use 0 or more. Received: {self.backoff_secs}")

    def pause_secs(self, failures: int) -> float:
        """How long to wait after so many failures, at least one."""
        return self.backoff_secs * 2 ** min(failures - 1, _MAX_BACKOFF_DOUBLINGS)


@dataclasses.dataclass(frozen=True)
class Request:
    """All processes of a job. As text, which is what a dry run shows, a shell command for each.

    Attributes:
      tasks: what to start, in this order.
      deciding: the names of the tasks that make it a success when all of them have succeeded.
      grace_secs: given to tasks to end by themselves.
      restarts: how often tasks are started again.
      computing: the names of the workers, without some of which the job may go on, in order.
      replaces_workers: whether a worker that fails is started again alone. Otherwise all tasks are, together.
      orphan_secs: after which tasks on hosts that can't be reached any more have ended by themselves.
    """

    tasks: tuple[TaskRequest, ...]
    deciding: frozenset[str]
    grace_secs: float
    restarts: Restarts = dataclasses.field(default_factory=Restarts)
    computing: tuple[str, ...] = ()
    replaces_workers: bool = False
    orphan_secs: float = 0.0

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))


def check_command(command: Sequence[str]) -> None:
    """Checks that the script, or the module after "-m", is there.

    Raises:
      LaunchError: it is not, or can't be read.
    """
    script, *arguments = command
    if script == "-m":
        _check_module(arguments[0] if arguments else "")
        return
    path = pathlib.Path(script)
    try:
        wrong = _script_problem(path)
    except (OSError, ValueError) as error:  # A name that is too long, or a directory that may not be entered.
        wrong = f"can't be looked up ({error}); check its name"
    if wrong:
        raise LaunchError(f"the script {wrong}. Received: {script!r}")


def _script_problem(path: pathlib.Path) -> str | None:
    if path.is_dir():
        found = (path / "__main__.py").exists()
        return None if found else "is a directory without __main__.py; name a file"
    if not path.exists():
        return f"does not exist (looked in {pathlib.Path.cwd()}); check its name"
    return None if os.access(path, os.R_OK) else "is not readable; try chmod +r"


def _check_module(name: str) -> None:
    """Looks for the outermost package only: looking further would import it."""
    sys.path.insert(0, "")  # `python -m` looks in the working directory first.
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove("")
    if found is None:
        raise LaunchError(f"there is no such module; check its name and PYTHONPATH. Received: -m {name!r}")
