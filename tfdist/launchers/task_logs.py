# SPDX-License-Identifier: Apache-2.0
"""Log files with the output of each task: DIRECTORY/RUN/attempt_0/worker_1/stdout.log.

A worker that is restarted alone continues in stdout.1.log, then stdout.2.log.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from tfdist.launchers.requests import LaunchError

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Destination of the tasks' output.

    Args:
      directory: directory for the log files; None for no files.
      run: name of this run: a folder in `directory`.
      tee: whether the output is also printed.
      quiet_workers: whether only the output of the chief and the evaluator is printed.

    Raises:
      LaunchError: the run's name is invalid, or all output would be lost.
    """

    directory: str | None = None
    run: str = ""
    tee: bool = True
    quiet_workers: bool = False

    def __post_init__(self) -> None:
        if self.run and not _RUN.fullmatch(self.run):
            raise LaunchError(
                f"--run is no name for a folder; use letters, digits, dots and dashes. Received: {self.run!r}"
            )
        if self.directory is None and not self.tee:
            raise LaunchError(
                "--notee would lose all output; name a directory with --task_logs. Received: --notee alone"
            )


def new_run_name() -> str:
    """Returns a name that sorts by time, and is unique among the launchers on this machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class TaskLogs:
    """The files of one attempt, each opened when its task first prints.

    Args:
      folder: DIRECTORY/RUN.
      attempt: number of the attempt, from 0.
      say: writes a line to the log if a file can't be written; the job continues.

    Raises:
      OSError: the folder can't be created.
    """

    def __init__(self, folder: pathlib.Path, attempt: int, say: Callable[[str], None]) -> None:
        self.folder = folder / f"attempt_{attempt}"
        self.folder.mkdir(parents=True)
        self._say = say
        self._lock = threading.Lock()
        self._files: dict[tuple[str, bool, int], IO[str] | None] = {}

    def write(self, task: str, lines: Sequence[str], error: bool, restart: int = 0) -> None:
        """Appends lines to the log of a task's standard output or standard error; `restart` counts its restarts."""
        key = task, error, restart
        with self._lock:
            try:
                if key not in self._files:
                    self._files[key] = self._open(*key)
                if file := self._files[key]:
                    file.write("".join(f"{_COLOUR.sub('', line)}\n" for line in lines))
                    file.flush()
            except OSError as problem:
                self._files[key] = None
                self._say(f"can't log what {task} prints: {problem}")

    def close_task(self, task: str) -> None:
        """Closes the files of a task that has ended; the others stay open."""
        with self._lock:
            for key in [key for key in self._files if key[0] == task]:
                if file := self._files.pop(key):
                    file.close()

    def _open(self, task: str, error: bool, restart: int) -> IO[str]:
        name = ("stderr" if error else "stdout") + (f".{restart}" if restart else "")
        path = self.folder / task.replace(":", "_") / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        return path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Closes the files; may be called again."""
        with self._lock:
            for file in self._files.values():
                if file:
                    file.close()
            self._files.clear()
