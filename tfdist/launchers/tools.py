# SPDX-License-Identifier: Apache-2.0
"""Runs command-line tools of the platforms, with a timeout, and with their errors on one line."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist import _log
from tfdist.launchers.requests import LaunchError, ToolError, shell_code


def find_tool(name: str, remedy: str) -> str:
    """Returns the path of a tool.

    Raises:
      LaunchError: the tool is not installed.
    """
    path = shutil.which(name)
    if path is None:
        raise LaunchError(f"there is no command {name} on this machine's PATH; {remedy}")
    return path


def run_tool(command: Sequence[str], stdin: str = "", timeout_secs: float | None = 120.0) -> str:
    """Runs a tool to its end, and returns its standard output.

    Raises:
      ToolError: the tool failed. The message has the end of its error output.
      LaunchError: the tool took too long.
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
    """Runs a tool that prints one line when its work is done, and may continue to run (such as `sbatch --wait`).

    Warnings on its standard error are printed with the line, and at the end.

    Args:
      command: the tool and its arguments.
      stdin: standard input of the tool.
      on_line: called with the line as soon as it is printed.
      timeout_secs: timeout for the line; the tool may run for any time afterwards.

    Returns:
      The exit code of the tool, after it has printed its line.

    Raises:
      ToolError: the tool failed before it printed a line. The message has the end of its error output.
      LaunchError: the tool printed no line in time.
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
    return shell_code(code)


def _pass_on(name: str, descriptor: int, start: int) -> int:
    """Writes a file's lines from `start` to standard error, with the tool's name; returns the new position."""
    data = _contents(descriptor, start)
    for line in data.decode("utf-8", "replace").splitlines():
        if line.strip():
            _log.say(line if line.startswith(f"{name}:") else f"{name}: {line}")
    return start + len(data)


def _contents(descriptor: int, start: int) -> bytes:
    # pread instead of seek, because the tool shares the file position.
    return os.pread(descriptor, os.fstat(descriptor).st_size - start, start)


def _first_line(process: subprocess.Popen[bytes], timeout_secs: float) -> str | None:
    """Returns the first line of output; "" if there is none, None after the timeout."""
    deadline, line, descriptor = time.monotonic() + timeout_secs, b"", process.stdout.fileno()
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        data = os.read(descriptor, 1)  # Byte by byte, because the line is short.
        if not data:
            break
        line += data
    return line.decode("utf-8", "replace")


def shell_exports(extra: Mapping[str, str]) -> str:
    """Returns shell commands that export the variables, one line each."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in extra.items())
