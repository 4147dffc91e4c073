# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a request to their end: output, first failure, signals, exit code."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.launchers.output import Console
from tfdist.launchers.processes import Process, Supervisor
from tfdist.launchers.requests import Request

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_LINES = 8
# A worker or ps that misses the chief may be seen to fail before the chief is seen to have succeeded.
_VERDICT_SECS = 1.0


def submit(request: Request) -> int:
    """Starts the tasks, prints what they print, and ends those that are left over.

    Returns:
      0 if all deciding tasks succeeded; else the code of the task that failed first (128+N if signal N ended it);
      130 after Ctrl-C, and 128+N after another signal N to this process.
    """
    received: list[int] = []
    supervisor = Supervisor(Console(on_broken_pipe=lambda: notify(signal.SIGPIPE)))

    def notify(signum: int) -> None:
        received.append(signum)
        supervisor.wake()

    with _handling(notify), supervisor:
        return _Run(request, supervisor, received).run()


class _Run:
    """One submission. `received` grows with each signal to this process, from its signal handler."""

    def __init__(self, request: Request, supervisor: Supervisor, received: list[int]) -> None:
        self._request = request
        self._supervisor = supervisor
        self._received = received

    def run(self) -> int:
        try:
            self._start()
        except OSError as error:
            self._say(f"a task could not be started: {error}")
            return 1
        failed = self._follow()
        if self._received:
            return self._end_interrupted(self._received[0])
        self._end([signal.SIGTERM])
        if failed is None:
            return 0
        self._say(*_obituary(failed))
        return _exit_code(failed)

    def _start(self) -> None:
        for task in self._request.tasks:
            self._supervisor.start(task.name, task.command, {**os.environ, **task.env})

    def _follow(self) -> Process | None:
        """Waits until the job is decided; returns the task that failed first, or None if none did."""
        undecided = set(self._request.deciding)
        failed, deadline = None, math.inf
        while undecided and not self._received and time.monotonic() < deadline:
            left = None if failed is None else max(0.0, deadline - time.monotonic())
            ended = self._supervisor.wait_first_exit(left)
            if ended and ended.returncode == 0:
                undecided.discard(ended.name)
            elif ended and ended.name in undecided:
                return failed or ended
            elif ended and failed is None:
                failed, deadline = ended, time.monotonic() + _VERDICT_SECS
        if undecided:
            return failed
        self._let_others_end()
        return None

    def _let_others_end(self) -> None:
        """They know from the chief that it is over; what they do from now on decides nothing."""
        deadline = time.monotonic() + self._request.grace_secs
        while self._supervisor.running and not self._received and time.monotonic() < deadline:
            self._supervisor.wait_first_exit(deadline - time.monotonic())

    def _end_interrupted(self, signum: int) -> int:
        if signum != signal.SIGPIPE:
            self._say(f"{_signal_name(signum)}: ending all tasks")
        # What Ctrl-C in a terminal would have sent comes first: a script may catch KeyboardInterrupt and save its work.
        # Only the first signal is answered by that: a second one may have come while the line was written.
        self._end([signal.SIGINT, signal.SIGTERM] if signum == signal.SIGINT else [signal.SIGTERM], answered=1)
        return 128 + signum

    def _end(self, signals: Sequence[int], answered: int = 0) -> None:
        """Ends all tasks, at once if more signals than `answered` show that the user has no patience left."""
        stopping = threading.Thread(
            target=self._supervisor.stop, args=(signals, self._request.grace_secs), name="tfdist stop", daemon=True
        )
        stopping.start()
        while stopping.is_alive():
            stopping.join(0.05)
            if len(self._received) > answered:
                self._supervisor.stop(signals=())
                break
        for process in self._supervisor.running:
            self._say(f"{process.name} (process {process.pid}) does not end, not even by SIGKILL")

    def _say(self, *lines: str) -> None:
        self._supervisor.say(lines)


@contextlib.contextmanager
def _handling(notify: Callable[[int], None]) -> Iterator[None]:
    """Hands signals to `notify`, those apart that this process was told to ignore (nohup)."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, lambda number, _: notify(number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _exit_code(process: Process) -> int:
    code = process.returncode or 0
    return code if code >= 0 else 128 - code


def _obituary(failed: Process) -> list[str]:
    """Its last lines, then who failed first and how: what to read first stands at the bottom of the screen."""
    code = failed.returncode or 0
    how = f"exit code {code}" if code > 0 else f"{_signal_name(-code)}, exit code {_exit_code(failed)}"
    shown = [line for line in failed.tail if line.strip()][-_SHOWN_LINES:]
    title = [f"the last lines of {failed.name}:"] if shown else []
    return [*title, *(f"  {line}" for line in shown), f"{failed.name} failed first ({how}); all tasks have ended"]


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
