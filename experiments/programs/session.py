# SPDX-License-Identifier: Apache-2.0
"""Runs the program of somebody else, which may start others, and ends all of it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

_GRACE_SECS = 15


@contextlib.contextmanager
def running(
    command: Sequence[str],
    directory: pathlib.Path,
    log: pathlib.Path,
    modules: Sequence[pathlib.Path],
    environment: Mapping[str, str],
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command within this block, in a session of its own, which is ended with the block.

    Args:
      command: the program and its arguments.
      directory: where it runs, and keeps its temporary files.
      log: the file for its output.
      modules: directories in which Python looks first for what the program imports.
      environment: variables besides this process' own.
    """
    paths = [*map(str, modules), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(directory),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **settings, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECS)
            return
