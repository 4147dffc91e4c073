# SPDX-License-Identifier: Apache-2.0
"""Runs a user's program as a process of its own, and finds every process that it has started.

What a program starts inherits its environment, so all of them carry the same mark, whoever their parent is by then.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping

import prefork
import psutil
from waiting import await_output

ROOT = pathlib.Path(__file__).resolve().parents[2]
_MARK = "TFDIST_TEST_MARK"
_HEADER = """
import os, signal, sys
import keras, numpy as np, tensorflow as tf
import tfdist
X = np.random.default_rng(0).random((64, 4), np.float32)
Y = X.sum(1, keepdims=True)
def model(strategy, optimizer="sgd"):
    with strategy.scope():
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        made.compile(optimizer, "mse")
    return made
"""


class Program:
    """One running program. Made by `running`."""

    def __init__(self, process: subprocess.Popen[bytes] | prefork.Process, log: pathlib.Path, mark: str) -> None:
        self.process = process
        self._log = log
        self._mark = mark

    @property
    def output(self) -> str:
        """Text that it and all that it started have written to standard output and error so far."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout_secs: float = 100) -> int:
        """Returns the exit code."""
        return self.process.wait(timeout_secs)

    def wait_for_output(self, text: str, timeout_secs: float = 100) -> None:
        """Returns when `text` was written."""
        await_output(self, text, timeout_secs)

    def family(self) -> list[psutil.Process]:
        """Every process alive that carries the mark: the program and all that it started."""
        return [
            process
            for process in psutil.process_iter()
            # /proc shows the environment that a fork's server began with.
            if carries(process, _MARK, self._mark) or (process.pid == self.process.pid and self.process.poll() is None)
        ]


def carries(process: psutil.Process, variable: str, value: str) -> bool:
    """Returns True if a process that has not ended has this in its environment."""
    try:
        return process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def running(
    script: str, directory: pathlib.Path, env: Mapping[str, str] = {}, name: str = "script", is_fork: bool = True
) -> contextlib.AbstractContextManager[Program]:
    """Starts Python code (after `_HEADER`) in `directory`; what is left of its family is killed at the end.

    Args:
      script: the code.
      directory: where it runs.
      env: additions to the environment.
      name: of the script's file.
      is_fork: False for a fresh Python, in which nothing of tfdist was imported yet.
    """
    path = directory / f"{name}.py"
    path.write_text(_HEADER + textwrap.dedent(script))
    return _started(path if is_fork else [sys.executable, str(path)], directory, env, name)


def serving(env: Mapping[str, str], directory: pathlib.Path) -> contextlib.AbstractContextManager[Program]:
    """Starts the task that TF_CONFIG in `env` names, as a process that only serves."""
    return _started([sys.executable, "-m", "tfdist.serving.task"], directory, env, "serving")


@contextlib.contextmanager
def _started(
    command: list[str] | pathlib.Path, directory: pathlib.Path, env: Mapping[str, str], name: str
) -> Iterator[Program]:
    """Starts a command, or a Python file in a fork."""
    log, mark = directory / f"{name}.log", uuid.uuid4().hex
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", _MARK: mark, **env}
    with log.open("wb") as output:
        if isinstance(command, pathlib.Path):
            process = prefork.start(command, environment, output, directory)
        else:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=directory)
    program = Program(process, log, mark)
    try:
        yield program
    finally:
        for left in program.family():
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.wait()
