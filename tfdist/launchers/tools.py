# SPDX-License-Identifier: Apache-2.0
"""The command-line tools of the platforms: found, run with a time limit, and their complaints on one line."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launchers.requests import LaunchError, ToolError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def find(name: str, remedy: str) -> str:
    """The path of a tool.

    Raises:
      LaunchError: it is not installed.
    """
    path = shutil.which(name)
    if path is None:
        raise LaunchError(f"there is no command {name} on this machine's PATH; {remedy}")
    return path


def run(command: Sequence[str], stdin: str = "", timeout_secs: float | None = 120.0) -> str:
    """Runs a tool to its end and returns what it printed to standard output.

    Raises:
      ToolError: it failed, with the end of what it said.
      LaunchError: it took too long.
    """
    name = os.path.basename(command[0])  # noqa: PTH119 - a name, not a file
    try:
        done = subprocess.run(command, input=stdin.encode("utf-8"), capture_output=True, timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{name} did not answer within {timeout_secs:g} s; try it by hand. Received: {command}"
        ) from None
    except UnicodeEncodeError:
        raise LaunchError(f"{name} takes UTF-8 only; rename what is not. Received: {command}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise ToolError(f"{name} failed with exit code {done.returncode}: {said[-500:] or 'it said nothing'}")
    return done.stdout.decode("utf-8", "replace")


def run_until_line(
    command: Sequence[str], stdin: str, on_line: Callable[[str], object], timeout_secs: float = 120.0
) -> int:
    """Runs a tool that prints one line when it has done its work, and may wait for something afterwards.

    Its warnings, on standard error, are passed on: with the line, and at the end.

    Args:
      command: the tool and its arguments.
      stdin: what it reads.
      on_line: given the line as soon as it is there.
      timeout_secs: until the line; the tool may take any time after it.

    Returns:
      The exit code of the tool, which printed its line.

    Raises:
      ToolError: it failed before it printed a line, with the end of what it said.
      LaunchError: it printed no line for so long.
    """
    name = os.path.basename(command[0])  # noqa: PTH119 - a name, not a file
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as errors:
        text.write(stdin.encode("utf-8"))
        text.seek(0)
        with subprocess.Popen(command, stdin=text, stdout=subprocess.PIPE, stderr=errors) as process:
            try:
                line = _first_line(process, timeout_secs)
                if line is None:
                    raise LaunchError(
                        f"{name} did not answer within {timeout_secs:g} s; try it by hand. Received: {command}"
                    )
                shown = 0
                if line:
                    on_line(line)
                    shown = _pass_on(name, errors.fileno(), shown)
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if not line and code:
            said = _contents(errors.fileno(), 0).decode("utf-8", "replace").strip()
            raise ToolError(f"{name} failed with exit code {code}: {said[-500:] or 'it said nothing'}")
        _pass_on(name, errors.fileno(), shown)
    return code if code >= 0 else 128 - code


def _pass_on(name: str, descriptor: int, start: int) -> int:
    """Writes what is in a file to standard error, behind the name of a tool; returns where to go on."""
    data = _contents(descriptor, start)
    for line in data.decode("utf-8", "replace").splitlines():
        if line.strip():
            sys.stderr.write(f"tfdist: {line}\n" if line.startswith(f"{name}:") else f"tfdist: {name}: {line}\n")
    return start + len(data)


def _contents(descriptor: int, start: int) -> bytes:
    # Without a seek: the tool writes at the same position.
    return os.pread(descriptor, os.fstat(descriptor).st_size - start, start)


def _first_line(process: subprocess.Popen[bytes], timeout_secs: float) -> str | None:
    """The first line of output, empty if there is none; None if it takes too long."""
    deadline, line, descriptor = time.monotonic() + timeout_secs, b"", process.stdout.fileno()
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        data = os.read(descriptor, 1)  # Byte by byte: it is short.
        if not data:
            break
        line += data
    return line.decode("utf-8", "replace")


def parse_environment(flag: str, settings: Sequence[str]) -> dict[str, str]:
    """Reads NAME=VALUE pairs; a NAME alone takes the value that it has here.

    Raises:
      LaunchError: a pair has no proper name, or the name alone is not set.
    """
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise LaunchError(
                f"--{flag} does not start with the name of a variable; write NAME=VALUE. Received: {setting!r}"
            )
        if not equals and name not in os.environ:
            raise LaunchError(f"--{flag}={name} takes the value from here, where it is not set; write {name}=VALUE")
        found[name] = value if equals else os.environ[name]
        if "\0" in found[name]:
            raise LaunchError(f"--{flag}={name} has a zero byte, which no environment can hold; remove it")
    return found


def shell_exports(extra: Mapping[str, str]) -> str:
    """How a variable is set in a shell script, one line each."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in extra.items())
