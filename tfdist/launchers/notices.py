# SPDX-License-Identifier: Apache-2.0
"""Passes lines from the launcher to the tasks of an attempt, in a file of a private folder.

The path is in the environment (`NOTICES_VARIABLE`). Where a task runs on another host, its connection carries the lines
there. So far the only line is "given up TASK", which the chief of parameter servers reads (`tfdist.serving`).
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
    """The file, and what writes to it. Once this process was killed, the guards of its tasks remove it (`_guard.py`).

    Attributes:
      env: where it is, for the environment of a task; nothing if this machine has no place for it. A job does without.
    """

    def __init__(self) -> None:
        self._path: pathlib.Path | None = None
        with contextlib.suppress(OSError):
            self._path = pathlib.Path(tempfile.mkdtemp(prefix=f"tfdist-notices-{os.getpid()}-")) / "notices"
            self._path.touch(mode=0o600)
        self.env = {NOTICES_VARIABLE: str(self._path)} if self._path else {}

    def add(self, line: str) -> None:
        """Appends a line. A full disk loses it: the tasks find out by themselves later."""
        if self._path:
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def close(self) -> None:
        """Removes the file; may be called again."""
        if self._path:
            shutil.rmtree(self._path.parent, ignore_errors=True)


class Reader:
    """Reads whole lines as they are added.

    Args:
      path: of the file; None for none.
    """

    def __init__(self, path: str | None) -> None:
        self._path = pathlib.Path(path) if path else None
        self._position = 0

    def new_lines(self) -> list[str]:
        """The lines since the last call."""
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
