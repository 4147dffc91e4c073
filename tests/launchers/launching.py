# SPDX-License-Identifier: Apache-2.0
"""Scripts that `tfdist launch` starts, the command itself, its lines while it is at work, and a supervisor of none."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

from tfdist.cluster import JOINED_VARIABLE
from tfdist.launchers.supervise.output import Tracebacks

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


# In place of an ending: time passes.
LATER = None


class Ended:
    """A task of `Scripted`."""

    pid = 1
    is_muted = False

    def __init__(self, name, env, restart):
        self.name, self.env, self.restart = name, env, restart
        self.returncode, self.ran_secs, self.tail = None, 0.0, [f"last line {restart}"]
        self.signals = []

    def wait(self, timeout_secs=None):
        return self.returncode

    def send_signal(self, signum):
        self.signals.append(signum)


class Scripted:
    """Stands for a `Supervisor` whose tasks end in a given order: name, return code, and how long each had run."""

    def __init__(self, *endings):
        self.endings = list(endings)
        self.started, self.lines = [], []
        self.tracebacks = Tracebacks()

    def start(self, name, command, env):
        pathlib.Path(env[JOINED_VARIABLE]).touch()
        task = Ended(name, env, sum(each.name == name for each in self.started))
        self.started.append(task)
        return task

    @property
    def running(self):
        return [task for task in self.started if task.returncode is None]

    def wait_first_exit(self, timeout_secs=None):
        running = {task.name: task for task in self.running}
        if not self.endings or self.endings[0] is LATER or self.endings[0][0] not in running:
            if self.endings[:1] == [LATER]:
                self.endings.pop(0)
            assert timeout_secs is not None, "nothing would ever happen"
            return None
        name, code, ran_secs = self.endings.pop(0)
        task = running[name]
        task.returncode, task.ran_secs = code, ran_secs
        return task

    def say(self, lines):
        self.lines += lines

    def stop(self, signals=(), grace_secs=0.0):
        for task in self.running:
            task.returncode = -signal.SIGTERM
