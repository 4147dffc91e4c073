# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a request to their end: output, first failure, signals, restarts, exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.launchers.output import Console
from tfdist.launchers.processes import Process, Supervisor
from tfdist.launchers.requests import PREEMPTED_EXIT_CODE, Request
from tfdist.launchers.task_logs import LogSettings, TaskLogs, new_run_name

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_LINES = 8
# A worker or ps that misses the chief may be seen to fail before the chief is seen to have succeeded.
_VERDICT_SECS = 1.0
# One that has lost another says that it may be started again, often before the one that failed is through with failing.
_CAUSE_SECS = 5.0
_MAX_BACKOFF_DOUBLINGS = 6


def submit(request: Request, logs: LogSettings = LogSettings()) -> int:  # noqa: B008 - frozen
    """Starts the tasks, prints what they print, ends those that are left over, and starts them again as it may.

    Args:
      request: what to run.
      logs: where output goes.

    Returns:
      0 if all deciding tasks succeeded; else the code of the task that failed first in the last attempt (128+N if
      signal N ended it); 130 after Ctrl-C, and 128+N after another signal N to this process.

    Raises:
      OSError: the directory for the logs can't be made.
    """
    submission = _Submission(request, logs)
    with _handling(submission.notify):
        return submission.run()


class _Submission:
    """All attempts of a request."""

    def __init__(self, request: Request, logs: LogSettings) -> None:
        self._request = request
        self._logs = logs
        self._folder = pathlib.Path(logs.directory, logs.run or new_run_name()) if logs.directory else None
        self._console = Console(on_broken_pipe=lambda: self.notify(signal.SIGPIPE))
        self._received: list[int] = []
        self._supervisor: Supervisor | None = None

    def notify(self, signum: int) -> None:
        """May be called from a signal handler."""
        self._received.append(signum)
        if self._supervisor:
            self._supervisor.wake()

    def run(self) -> int:
        """Returns the exit code."""
        failures = preemptions = attempt = 0
        restarts = self._request.restarts
        while True:
            outcome = self._attempt(attempt)
            attempt += 1
            if outcome.failed is None or self._received:
                return outcome.code
            if outcome.code == PREEMPTED_EXIT_CODE:
                preemptions += 1
                if preemptions > restarts.max_preemptions:
                    return outcome.code
                backoff_secs, why = restarts.backoff_secs, f"preemption {preemptions}"
            else:
                failures += 1
                if failures > restarts.max_restarts:
                    return outcome.code
                backoff_secs = restarts.backoff_secs * 2 ** min(failures - 1, _MAX_BACKOFF_DOUBLINGS)
                why = f"restart {failures} of {restarts.max_restarts}"
            self._say(f"starting all tasks again in {backoff_secs:g} s ({why})")
            if not self._pause(backoff_secs):
                return 128 + self._received[0]

    def _attempt(self, attempt: int) -> _Outcome:
        logs = TaskLogs(self._folder, attempt, self._say) if self._folder else None
        console = self._console if self._logs.tee else _Quiet(self._console)
        try:
            with Supervisor(console, logs.write if logs else None) as supervisor:
                self._supervisor = supervisor
                return _Run(self._request, supervisor, self._received, attempt, logs).run()
        finally:
            if logs:
                logs.close()

    def _pause(self, secs: float) -> bool:
        """Waits; False once a signal has come. The supervisor has ended, and only wakes us."""
        deadline = time.monotonic() + secs
        while self._supervisor and not self._received and time.monotonic() < deadline:
            self._supervisor.wait_first_exit(max(0.0, deadline - time.monotonic()))
        return not self._received

    def _say(self, *lines: str) -> None:
        self._console.write("tfdist: ", lines, error=True)


class _Quiet(Console):
    """Shows only what the launcher says itself."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def keeps_colours(self, error: bool) -> bool:
        return False

    def write(self, prefix: str, lines: Any, error: bool = False, number: int | None = None) -> None:
        if number is None:
            self._console.write(prefix, lines, error)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """How an attempt ended: the exit code, and the task that failed first, if that is what decided."""

    code: int
    failed: Process | None = None


class _Run:
    """One attempt. `received` grows with each signal to this process, from its signal handler."""

    def __init__(
        self, request: Request, supervisor: Supervisor, received: list[int], attempt: int, logs: TaskLogs | None
    ) -> None:
        self._request = request
        self._supervisor = supervisor
        self._received = received
        self._attempt = attempt
        self._logs = logs

    def run(self) -> _Outcome:
        try:
            self._start()
        except OSError as error:
            self._say(f"a task could not be started: {error}")
            return _Outcome(1)
        failed = self._follow()
        if self._received:
            return _Outcome(self._end_interrupted(self._received[0]))
        self._end([signal.SIGTERM])
        if failed is None:
            return _Outcome(0)
        self._say(*_obituary(failed), *([f"its output is below {self._logs.folder}"] if self._logs else []))
        return _Outcome(_exit_code(failed), failed)

    def _start(self) -> None:
        attempt = {"TFDIST_ATTEMPT": str(self._attempt)}
        for task in self._request.tasks:
            self._supervisor.start(task.name, task.command, {**os.environ, **task.env, **attempt})

    def _follow(self) -> Process | None:
        """Waits until the job is decided; returns the task that failed first, or None if none did."""
        undecided, pending = set(self._request.deciding), len(self._request.tasks)
        failed, deadline = None, math.inf
        while undecided and pending and not self._received and time.monotonic() < deadline:
            left = None if failed is None else max(0.0, deadline - time.monotonic())
            ended = self._supervisor.wait_first_exit(left)
            if ended is None:
                continue
            pending -= 1
            if ended.returncode == 0:
                undecided.discard(ended.name)
            elif failed is None:
                failed, deadline = ended, time.monotonic() + _verdict_secs(ended, ended.name in undecided)
            elif failed.returncode == PREEMPTED_EXIT_CODE != ended.returncode:
                return ended
            elif ended.name in undecided:
                return failed
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


def _verdict_secs(failed: Process, is_deciding: bool) -> float:
    """How long after a failure the others may show that something else was the cause."""
    if failed.returncode == PREEMPTED_EXIT_CODE:
        return _CAUSE_SECS
    return 0.0 if is_deciding else _VERDICT_SECS


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
