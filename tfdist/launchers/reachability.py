# SPDX-License-Identifier: Apache-2.0
"""Finds the unreachable hosts of a job, because a lost host may be the cause of another task's failure."""

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

# Equals ssh's ConnectTimeout for starting a task.
_ANSWER_SECS = 15.0
_LOOK_SECS = 0.05


def unreachable(probes: Mapping[str, Sequence[str]], is_interrupted: Callable[[], bool]) -> dict[str, str]:
    """Probes all hosts at once, and hosts without an answer a second time.

    The second attempt is for hosts with a slow login, for example because of a slow directory service.

    Args:
      probes: for each host a command that succeeds if the host can be reached, such as `ssh HOST true`.
      is_interrupted: returns True to end the wait for answers.

    Returns:
      The reason for each unreachable host; {} if interrupted.
    """
    reasons = _reasons(probes, is_interrupted)
    return _reasons({host: probes[host] for host in reasons}, is_interrupted)


def _reasons(probes: Mapping[str, Sequence[str]], is_interrupted: Callable[[], bool]) -> dict[str, str]:
    running = {host: _Probe(command) for host, command in probes.items()}
    deadline = time.monotonic() + _ANSWER_SECS
    while any(probe.is_running for probe in running.values()) and time.monotonic() < deadline:
        if is_interrupted():
            break
        time.sleep(_LOOK_SECS)
    reasons = {host: reason for host, probe in running.items() if (reason := probe.close())}
    return {} if is_interrupted() else reasons


class _Probe:
    """Running probe command of one host."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = io.BytesIO()
        try:
            # No pipe, which a background process of the command could keep open.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError:
            self._process = None  # A local error, which doesn't depend on the host.

    @property
    def is_running(self) -> bool:
        """True until the command has ended."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> str:
        """Ends the probe; returns the reason why the host can't be reached, or "" if it can."""
        with self._errors:
            if self._process is None:
                return ""
            if self.is_running:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                return f"it does not answer within {_ANSWER_SECS:g} s"
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            code = self._process.returncode
            return (said[-1][:200] if said else f"exit code {code}") if code else ""
