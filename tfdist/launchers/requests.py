# SPDX-License-Identifier: Apache-2.0
"""Description of a job as processes, in text and numbers, for all platforms."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import _log

# Exit code of a script that was preempted and has saved its work, or has lost its chief or peers (EX_TEMPFAIL of
# sysexits.h: "try again later"). Launchers start the job again and don't count it as a failure.
TRY_AGAIN_EXIT_CODE = 75
# Exit codes after which a restart is of no use: an invalid command line, a program that can't be run.
HOPELESS_EXIT_CODES = (2, 126, 127)
# Prefix of a remote task's variables in the environment of the local process that connects to its host.
SENT_PREFIX = "TFDIST_SEND_"
_MAX_BACKOFF_DOUBLINGS = 6
_MOST_SECS = 100_000_000


def shell_code(code: int | None) -> int:
    """Returns the exit code of a shell for the return code of `subprocess`: 128+N where signal N ended the process."""
    return 128 - code if code and code < 0 else code or 0


class LaunchError(ValueError):
    """The job can't be started. The message is one line."""


class ToolError(LaunchError):
    """A tool, such as sbatch, refused the job or did not answer (`is_late`); `output`, `errors`: all that it wrote."""

    def __init__(self, message: str, output: bytes = b"", errors: str = "", is_late: bool = False) -> None:
        super().__init__(message)
        self.output, self.errors, self.is_late = output.decode("utf-8", "replace"), errors, is_late


def setting(
    default: Any, text: str, kind: type | tuple[str, ...] | None = None, least: int = 0, most: int | None = None
) -> Any:
    """Returns the field of a job's dataclass that is a flag of the same name. See `command_line.define_settings`.

    Args:
      default: value of the field, and of the flag.
      text: help of the flag.
      kind: type of the flag, or its choices; that of the default by default.
      least: least value of a number.
      most: greatest value of a number; that of durations by default, as no wait can be longer.
    """
    kind = kind or type(default)
    bounds = {"lower_bound": least, "upper_bound": _MOST_SECS if kind is float else most}
    metadata = {"default": default, "text": text, "kind": kind, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


def shell_join(words: Sequence[str]) -> str:
    """Returns a command for a shell elsewhere, which puts its own home in place of a leading ~/ of the program."""
    program, *arguments = words
    is_at_home = program.startswith("~/")
    return " ".join(["~/" * is_at_home + shlex.quote(program.removeprefix("~/")), *map(shlex.quote, arguments)])


def read_file(name: str, path: str, remedy: str = "name a file that exists") -> str:
    """Reads a text file that the user names; in messages, `name` is its flag, such as "--hostfile".

    Raises:
      LaunchError: the file can't be read.
    """
    try:
        return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise LaunchError(f"{name} can't be read: {problem}; {remedy}. Received: {path!r}") from None


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Returns the JSON object that is the value of a flag; the error has an example.

    Raises:
      LaunchError: it is none.
    """
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise LaunchError(f"--{flag} is no JSON object; write it as --{flag}='{example}'. Received: {text}")


def make_folder(name: str, folder: pathlib.Path) -> None:
    """Creates a folder that the user names, with those above it.

    Raises:
      LaunchError: the folder can't be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{name} has a folder that can't be created: {error.strerror}; use one that you may write to. Received: "
            f"{str(folder)!r}"
        ) from None


@dataclasses.dataclass(frozen=True)
class TaskRequest:
    """One process of a job.

    Attributes:
      name: name of the task, such as "worker:1".
      env: variables added to the environment.
      command: program and arguments.
      host: the remote machine on which the task itself runs; "" for this machine.
      probe: a command that succeeds if the remote machine can be reached.
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
    """Limits of restarts: of all tasks together, or of a single worker.

    After `settled_secs` of a worker's run, its next failure is the first in a row.
    """

    max_restarts: int = setting(0, "restarts of all tasks after failures")
    restart_backoff_secs: float = setting(1.0, "seconds before the first restart; doubles each time, up to 64-fold")
    max_preemptions: int = setting(100, f"restarts of all tasks after a preemption (code {TRY_AGAIN_EXIT_CODE})")
    max_worker_restarts: int = setting(3, "restarts in a row of a worker that fails, before it is given up")
    min_workers: int | None = setting(
        None, "least number of workers to continue with when others are given up; all by default", int, least=1
    )
    # TensorFlow takes up to 20 s to import where several tasks do it at once; ssh needs 15 s to notice a lost host.
    settled_secs: float = 30.0

    def pause_secs(self, failures: int) -> float:
        """Returns the pause before the restart after so many failures (at least 1)."""
        return self.restart_backoff_secs * 2 ** min(failures - 1, _MAX_BACKOFF_DOUBLINGS)


@dataclasses.dataclass(frozen=True)
class Request:
    """All processes of a job. `str` returns a shell command for each, as in a dry run.

    Attributes:
      tasks: the processes, in the order in which they are started.
      deciding: names of the tasks that must succeed for the job to succeed.
      grace_secs: time for tasks to end by themselves.
      restarts: limits of restarts.
      computing: names of the workers, in order; the job may continue without some of them.
      replaces_workers: True if a failed worker is started again alone; False if all tasks restart together.
      orphan_secs: time after which tasks on unreachable hosts have ended by themselves.
      reporting: names of the tasks whose output --quiet_workers keeps.
    """

    tasks: tuple[TaskRequest, ...]
    deciding: frozenset[str]
    grace_secs: float
    restarts: Restarts = dataclasses.field(default_factory=Restarts)
    computing: tuple[str, ...] = ()
    replaces_workers: bool = False
    orphan_secs: float = 0.0
    reporting: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))


def check_command(command: Sequence[str]) -> None:
    """Checks that the script, or the module after "-m", exists.

    Raises:
      LaunchError: it doesn't exist, or can't be read.
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
        return f"does not exist{'' if path.is_absolute() else f' (looked in {pathlib.Path.cwd()})'}; check its name"
    if not path.is_file():
        return "is no file, and each task reads it by itself; write it to one"
    return None if os.access(path, os.R_OK) else "is not readable; try chmod +r"


def _check_module(name: str) -> None:
    """Checks that a module exists, but only its outermost package: finding a submodule would import the package."""
    sys.path.insert(0, "")  # `python -m` looks in the working directory first.
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.remove("")
    if found is None:
        raise LaunchError(f"there is no such module; check its name and PYTHONPATH. Received: -m {name!r}")


# Runs command-line tools of the platforms, with a timeout, and with their errors on one line.


def find_tool(name: str, remedy: str) -> str:
    """Returns the path of a tool; raises a LaunchError if the tool is not installed."""
    path = shutil.which(name)
    if path is None:
        raise LaunchError(f"there is no command {name} on this machine's PATH; {remedy}")
    return path


def run_tool(
    command: Sequence[str], stdin: str = "", timeout_secs: float | None = 120.0, show_warnings: bool = False
) -> str:
    """Runs a tool to its end, and returns its standard output.

    Args:
      command: program and arguments.
      stdin: text for its standard input.
      timeout_secs: time after which it is killed.
      show_warnings: whether to write what it says on standard error though it succeeds.

    Raises:
      ToolError: the tool failed, or took too long. The message has the end of its error output, on one line.
      LaunchError: a text is not UTF-8.
    """
    name = os.path.basename(command[0])  # noqa: PTH119 - a name, not a file
    try:
        done = subprocess.run(command, input=stdin.encode("utf-8"), capture_output=True, timeout=timeout_secs)
    except subprocess.TimeoutExpired as late:
        message = f"{name} did not answer within {timeout_secs:g} s; try it by hand. Received: {shlex.join(command)}"
        raise ToolError(message, late.stdout or b"", is_late=True) from None
    except UnicodeEncodeError:
        raise LaunchError(f"{name} takes UTF-8 only; rename what is not. Received: {command}") from None
    said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode:
        said = said or done.stdout.decode("utf-8", "replace").splitlines()
        reason = "; ".join(said)[-500:] or "it said nothing"
        raise ToolError(f"{name} failed with exit code {done.returncode}: {reason}", done.stdout, "\n".join(said))
    if show_warnings:
        _log.say(*(f"{name}: {line}" for line in said))
    return done.stdout.decode("utf-8", "replace")
