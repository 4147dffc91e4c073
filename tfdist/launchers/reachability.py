# SPDX-License-Identifier: Apache-2.0
"""Finds the hosts of a job that can't be reached: a silent host may be the cause of a failure."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

# As long as the connection that a task is started through may take.
_ANSWER_SECS = 15.0
_LOOK_SECS = 0.05


def unreachable(probes: Mapping[str, Sequence[str]], is_interrupted: Callable[[], bool]) -> dict[str, str]:
    """Tries all hosts at once, and those that do not answer a second time.

    One that is slow to log in once, as where its directory service is slow, is not lost.

    Args:
      probes: a command for each host that succeeds if it can be reached, such as `ssh HOST true`.
      is_interrupted: ends the wait for answers.

    Returns:
      Why not, for each host that can't be reached; nothing if interrupted.
    """
    reasons = _reasons(probes, is_interrupted)
    return _reasons({host: probes[host] for host in reasons}, is_interrupted)


def _reasons(probes: Mapping[str, Sequence[str]], is_interrupted: Callable[[], bool]) -> dict[str, str]:
    asking = {host: _Question(command) for host, command in probes.items()}
    deadline = time.monotonic() + _ANSWER_SECS
    while any(question.is_open for question in asking.values()) and time.monotonic() < deadline:
        if is_interrupted():
            break
        time.sleep(_LOOK_SECS)
    reasons = {host: reason for host, question in asking.items() if (reason := question.close())}
    return {} if is_interrupted() else reasons


class _Question:
    """One host that is asked."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = io.BytesIO()
        try:
            # A pipe could be kept open by what the command leaves behind.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError:
            self._process = None  # That says nothing about the host.

    @property
    def is_open(self) -> bool:
        """Whether there is no answer yet."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> str:
        """Why the host can't be reached; "" if it can."""
        with self._errors:
            if self._process is None:
                return ""
            if self.is_open:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                return f"it does not answer within {_ANSWER_SECS:g} s"
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            code = self._process.returncode
            return (said[-1][:200] if said else f"exit code {code}") if code else ""
