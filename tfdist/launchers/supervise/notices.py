# SPDX-License-Identifier: Apache-2.0
"""Notices between the launcher and the tasks of an attempt, in a private folder.

Notices are lines from the launcher to the tasks, in a file.

The path is in the environment (`NOTICES_VARIABLE`). A task on another host gets the lines through its connection. The
chief of parameter servers reads "given up TASK" (`tfdist.serving.embedded`). A task that waits for the others to start
reads "ended TASK", of one that has ended with code 0 (`check_none_ended`). In a Slurm job it reads that in the
directory of the exit codes instead.

The other way, a task that builds a strategy for the cluster makes an empty file (`tfdist.cluster.note_joined`). A job
whose tasks have all ended well without that file has most likely run its script several times over.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection

from tfdist.cluster import JOINED_VARIABLE, NOTICES_VARIABLE
from tfdist.launchers.slurm import exits as slurm_exits

GIVEN_UP, ENDED = "given up ", "ended "
# Interval of looks at a directory that all hosts of a Slurm job share.
_SLURM_SECS = 4.0


class Notices:
    """Writer of the notices.

    Attributes:
      env: variables with the paths, for the environment of a task; {} if the folder can't be created. A job runs
        without.
    """

    def __init__(self) -> None:
        self._path: pathlib.Path | None = None
        with contextlib.suppress(OSError):
            self._path = pathlib.Path(tempfile.mkdtemp(prefix=f"tfdist-notices-{os.getpid()}-")) / "notices"
            self._path.touch(mode=0o600)
        self.env = {NOTICES_VARIABLE: str(self._path), JOINED_VARIABLE: str(self._joined)} if self._path else {}

    @property
    def has_joined(self) -> bool:
        """True if a task with this environment has joined the cluster, or if that can't be known."""
        return self._path is None or self._joined.exists()

    @property
    def joining(self) -> dict[str, str]:
        """The part of `env` for a task that no notices are for."""
        return {name: value for name, value in self.env.items() if name == JOINED_VARIABLE}

    @property
    def _joined(self) -> pathlib.Path:
        return (self._path or pathlib.Path()).with_name("joined")

    def add(self, line: str) -> None:
        """Appends a line. On a full disk the line is lost, and the tasks detect the fact later by themselves."""
        if self._path:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def close(self) -> None:
        """Removes the file; may be called again."""
        if self._path:
            shutil.rmtree(self._path.parent, ignore_errors=True)


def not_joined(num_tasks: int, has_ps: bool, after_secs: float | None = None) -> str:
    """Returns the line about a job that has ended well, or runs for some time, and none of whose tasks has joined."""
    strategy = "ParameterServerStrategy" if has_ps else "MultiWorkerMirroredStrategy"
    when, joins, runs = ("", "joined", "ran") if after_secs is None else (f" in {after_secs:g} s", "joins", "runs")
    return (
        f"no task has joined the cluster by a strategy of tfdist, such as tfdist.{strategy}(){when}: unless the script "
        f"{joins} it in another way, such as by a stock tf.distribute strategy, each of {num_tasks} tasks {runs} on "
        "its own"
    )


class Reader:
    """Reader of complete lines as they are added.

    Args:
      path: path of the file; None for no notices.
    """

    def __init__(self, path: str | None) -> None:
        self._path = pathlib.Path(path) if path else None
        self._position = 0

    def new_lines(self) -> list[str]:
        """Returns the lines since the last call."""
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole.decode("utf-8", "replace").splitlines()


def check_none_ended(tasks: Collection[str]) -> Callable[[], None]:
    """Returns a function that raises a RuntimeError if the launcher says that one of these awaited tasks has ended."""
    reader, slurm_secs = Reader(os.environ.get(NOTICES_VARIABLE)), time.monotonic() + _SLURM_SECS

    def check() -> None:
        nonlocal slurm_secs
        ended = {line.removeprefix(ENDED) for line in reader.new_lines() if line.startswith(ENDED)} & {*tasks}
        if not ended and time.monotonic() >= slurm_secs:
            ended, slurm_secs = slurm_exits.ended_well(tasks), time.monotonic() + _SLURM_SECS
        if ended:
            raise RuntimeError(
                f"{min(ended)} has ended with code 0 and has not joined the cluster; every task must build the "
                "strategy: remove the `if` around it"
            )

    return check
