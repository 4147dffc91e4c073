# SPDX-License-Identifier: Apache-2.0
"""Kills tasks that a launcher has started, at random, one every so many seconds. Linux only: it looks in /proc."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Mapping

# Carried by the launcher and all that it starts.
MARK = "TFDIST_CHAOS_RUN"
_GUARD = b"supervise/guard.py"


class Killer:
    """Sends SIGKILL to one task after the other.

    Args:
      find: returns the process ids of the tasks that run, by name.
      interval_secs: from one kill to the next, and from the first step to the first kill.
      seed: of the choice.
      most_kills: how many there are at most; None for no end.
      least_training_secs: for how long steps have to be made from one kill to the next, however long that takes. With
        0, a job that takes longer to come back than the interval makes no progress.
      kill: ends a process.

    Attributes:
      kills: (seconds since 1970, name of the task) of each kill.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, int]],
        interval_secs: float,
        seed: int,
        most_kills: int | None = None,
        least_training_secs: float = 0.0,
        kill: Callable[[int], object] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        self.kills: list[tuple[float, str]] = []
        self._find, self._kill = find, kill
        self._interval_secs, self._most_kills = interval_secs, most_kills
        self._least_training_secs = least_training_secs
        self._random = random.Random(seed)
        self._has_begun = False
        self._secs = self._training_secs = 0.0

    def advance(self, secs: float, is_training: bool) -> None:
        """Notes that time has passed, and kills a task if it is time.

        Where none runs, because all are being started again, the next call does.

        Args:
          secs: since the last call.
          is_training: whether steps were being made.
        """
        if self._has_begun:
            self._secs += secs
            self._training_secs += secs if is_training else 0.0
        self._has_begun |= is_training
        is_due = self._secs >= self._interval_secs and self._training_secs >= self._least_training_secs
        if not is_due or len(self.kills) == self._most_kills:
            return
        tasks = self._find()
        if not tasks:
            return
        name = self._random.choice(sorted(tasks))
        # It may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            self._kill(tasks[name])
            self.kills.append((time.time(), name))
        self._secs = self._training_secs = 0.0


def find_tasks(run: str, proc: pathlib.Path = pathlib.Path("/proc")) -> dict[str, int]:
    """The process ids of the tasks, by name, such as "worker:1".

    Args:
      run: the value of `MARK` in their environment.
      proc: where processes are listed.
    """
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        # Others' processes, and those that have just ended, can't be read.
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            values = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
            # A guard has the environment of its task.
            is_guard = _GUARD in (folder / "cmdline").read_bytes()
            if values.get(MARK.encode()) == run.encode() and b"TF_CONFIG" in values and not is_guard:
                task = json.loads(values[b"TF_CONFIG"])["task"]
                found[f"{task['type']}:{task['index']}"] = int(folder.name)
    return found
