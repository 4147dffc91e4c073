# SPDX-License-Identifier: Apache-2.0
"""Scripts that `tfdist launch` starts, the command itself, and its lines while it is at work."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

# Tasks are told apart by their names, as a user's script never has to.
PREAMBLE = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}:{task['index']}"
"""
# Of a task that has joined the cluster, as strategies do. Else the launcher says a line about it.
JOINED = PREAMBLE + 'open(os.environ.get("TFDIST_JOINED", os.devnull), "a").close()\n'


def command(platform: str, *arguments: str) -> list[str]:
    """The command line of a launcher."""
    return [sys.executable, "-m", "tfdist", "launch", platform, *arguments]


class Launch:
    """A launcher at work, and the lines that were read of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, []

    def read_until(self, text: str) -> str:
        """Reads up to a line with this text, and returns it."""
        for line in self.process.stdout:
            sys.stdout.write(f"{time.time():.1f} {line}")
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not written:\n" + "\n".join(self.lines))

    def wait(self) -> int:
        """Reads the rest; returns the exit code."""
        with contextlib.suppress(AssertionError):
            self.read_until("\0")
        return self.process.wait()

    @property
    def said(self) -> list[str]:
        """The lines of the launcher itself."""
        return [line for line in self.lines if line.startswith("tfdist: ")]
