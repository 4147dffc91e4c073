# SPDX-License-Identifier: Apache-2.0
"""Waits of tests, and a time for what is given a clock."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


class Clock:
    """A time that only tests move, by `now`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def wait_until(
    condition: Callable[[], object], timeout_secs: float = 60.0, message: Callable[[], str] = lambda: "waited in vain"
) -> None:
    """Returns when a condition holds.

    Args:
      condition: the condition, looked at again and again.
      timeout_secs: the longest wait.
      message: what the failure says after that.
    """
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, message()
        # Only the interval of looking: what is waited for is the condition. Shorter ones take the CPU of other tests.
        time.sleep(0.02)


def await_output(program: Any, text: str, timeout_secs: float) -> None:
    """Returns when a program has written a text; fails as soon as it has ended without.

    Args:
      program: has `output`, what was written so far, and `process`.
      text: the text.
      timeout_secs: the longest wait.
    """
    has_ended = False
    while text not in program.output:
        # Looked at once more after the end.
        assert not has_ended, f"{text!r} was not written:\n{program.output}"
        wait_until(
            lambda: text in program.output or program.process.poll() is not None, timeout_secs, lambda: program.output
        )
        has_ended = program.process.poll() is not None


def end(process: subprocess.Popen[Any], timeout_secs: float = 20.0) -> None:
    """Ends a process by SIGTERM, and by SIGKILL once it has not ended in time."""
    process.terminate()
    try:
        process.wait(timeout_secs)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
