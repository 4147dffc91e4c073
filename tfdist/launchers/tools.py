# SPDX-License-Identifier: Apache-2.0
"""Runs command-line tools of the platforms, with a timeout, and with their errors on one line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from tfdist import _log
from tfdist.launchers.requests import LaunchError, ToolError


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
