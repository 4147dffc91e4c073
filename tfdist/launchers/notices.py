# SPDX-License-Identifier: Apache-2.0
"""Notices: lines from the launcher to the tasks of an attempt, in a file of a private folder.

The path is in the environment (`NOTICES_VARIABLE`). A task on another host gets the lines through its connection. The
only line so far is "given up TASK", which the chief of parameter servers reads (`tfdist.serving.embedded`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile

from tfdist.cluster import NOTICES_VARIABLE

GIVEN_UP = "given up "


class Notices:
    """Writer of the notices. If this process is killed, the guards of its tasks remove the file (`_guard.py`).

    Attributes:
      env: variable with the path, for the environment of a task; {} if the file can't be created. A job runs without.
    """

    def __init__(self) -> None:
        self._path: pathlib.Path | None = None
        with contextlib.suppress(OSError):
            self._path = pathlib.Path(tempfile.mkdtemp(prefix=f"tfdist-notices-{os.getpid()}-")) / "notices"
            self._path.touch(mode=0o600)
        self.env = {NOTICES_VARIABLE: str(self._path)} if self._path else {}

    def add(self, line: str) -> None:
        """Appends a line. On a full disk the line is lost, and the tasks detect the fact later by themselves."""
        if self._path:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def close(self) -> None:
        """Removes the file; may be called again."""
        if self._path:
            shutil.rmtree(self._path.parent, ignore_errors=True)


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
