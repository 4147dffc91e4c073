# SPDX-License-Identifier: Apache-2.0
"""Which hosts of a job can't be reached: the cause of a failure may be a host that says nothing any more."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

_ANSWER_SECS = 8.0
_LOOK_SECS = 0.05


def unreachable(probes: Mapping[str, Sequence[str]], is_interrupted: Callable[[], bool]) -> dict[str, str]:
    """Asks all hosts at once.

    Args:
      probes: a command for each host that succeeds if it can be reached, such as `ssh HOST true`.
      is_interrupted: ends the wait for answers.

    Returns:
      Why not, for each host that can't be reached; nothing if interrupted.
    """
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
        # A pipe could be kept open by what the command leaves behind.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
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
                self._process.kill()
                self._process.wait()
                return f"it does not answer within {_ANSWER_SECS:g} s"
            self._errors.seek(0)
            said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            code = self._process.returncode
            return (said[-1][:200] if said else f"exit code {code}") if code else ""
