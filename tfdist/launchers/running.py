# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a request to their end: in several attempts, and with fewer workers if some are given up."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.launchers.attempts import Attempt, Outcome
from tfdist.launchers.output import Console
from tfdist.launchers.processes import Supervisor
from tfdist.launchers.replacements import FailureRows
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE, Request
from tfdist.launchers.task_logs import LogSettings, TaskLogs, new_run_name

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Returns the request for the same job without some workers, by their names in the whole job.
Replan = Callable[[frozenset[str]], Request]


def submit(
    request: Request,
    logs: LogSettings = LogSettings(),  # noqa: B008 - frozen
    replan: Replan | None = None,
) -> int:
    """Runs the tasks to their end and prints their output; after a failure, ends all tasks and restarts them.

    Args:
      request: the tasks to run.
      logs: log settings.
      replan: returns the request for the same job without some workers, by their names in `request`. None if the job
        can't run with fewer workers.

    Returns:
      0 if all deciding tasks succeeded; else the code of the task that failed first in the last attempt (128+N if
      signal N ended it); 130 after Ctrl-C, and 128+N after another signal N to this process.

    Raises:
      OSError: the directory for the logs can't be made.
    """
    submission = _Submission(request, logs, _RemainingWorkers(request, replan))
    with _handling(submission.notify):
        return submission.run()


class _Submission:
    """All attempts of a request."""

    def __init__(self, request: Request, logs: LogSettings, workers: _RemainingWorkers) -> None:
        self._restarts = request.restarts
        self._workers = workers
        self._logs = logs
        self._folder = pathlib.Path(logs.directory, logs.run or new_run_name()) if logs.directory else None
        self._console = Console(on_broken_pipe=lambda: self.notify(signal.SIGPIPE))
        self._received: list[int] = []
        self._supervisor: Supervisor | None = None

    def notify(self, signum: int) -> None:
        """Notes a signal to this process. May be called from a signal handler."""
        self._received.append(signum)
        if self._supervisor:
            self._supervisor.wake()

    def run(self) -> int:
        """Runs attempts until the job has ended; returns the exit code."""
        failures = preemptions = attempt = 0
        restarts = self._restarts
        while True:
            outcome = self._attempt(attempt)
            attempt += 1
            if outcome.failed is None:
                return outcome.code
            if self._received:
                return 128 + self._received[0]
            if self._workers.drop_failed(outcome):
                self._say(f"going on with {self._workers}: starting all tasks again")
                failures = 0
                continue
            if outcome.code == TRY_AGAIN_EXIT_CODE:
                preemptions += 1
                if preemptions > restarts.max_preemptions:
                    return self._gives_up(outcome, "--max_preemptions", restarts.max_preemptions)
                backoff_secs, why = restarts.backoff_secs, f"preemption {preemptions}"
            else:
                failures += 1
                if failures > restarts.max_restarts:
                    return self._gives_up(outcome, "--max_restarts", restarts.max_restarts)
                backoff_secs = restarts.pause_secs(failures)
                why = f"restart {failures} of {restarts.max_restarts}"
            backoff_secs = max(backoff_secs, outcome.orphan_secs)
            self._say(f"starting all tasks again in {backoff_secs:g} s ({why})")
            if not self._pause(backoff_secs):
                return 128 + self._received[0]

    def _gives_up(self, outcome: Outcome, flag: str, most: int) -> int:
        if most:  # With a limit of 0 the user expects no restart.
            self._say(f"not starting again: {flag}={most} is used up")
        return outcome.code

    def _attempt(self, number: int) -> Outcome:
        logs = TaskLogs(self._folder, number, self._say) if self._folder else None
        console = self._console if self._logs.tee else _Quiet(self._console)
        on_lines = (lambda task, lines, error: logs.write(task.name, lines, error, task.restart)) if logs else None
        try:
            workers = self._workers
            shown = workers.request.reporting if self._logs.quiet_workers else None
            with Supervisor(console, on_lines, shown) as supervisor:
                self._supervisor = supervisor
                return Attempt(workers.request, supervisor, self._received, number, workers.min_workers, logs).run()
        finally:
            if logs:
                logs.close()

    def _pause(self, secs: float) -> bool:
        """Waits for `secs`; returns False once a signal has arrived, which wakes the supervisor."""
        deadline = time.monotonic() + secs
        while self._supervisor and not self._received and time.monotonic() < deadline:
            self._supervisor.wait_first_exit(max(0.0, deadline - time.monotonic()))
        return not self._received

    def _say(self, *lines: str) -> None:
        self._console.write("tfdist: ", lines, error=True)


class _RemainingWorkers:
    """The remaining workers of a job. `str` returns their number, and the names of the dropped ones.

    Args:
      request: request for the whole job.
      replan: see `submit`.

    Attributes:
      request: request with the remaining workers.
      min_workers: least number of workers.
    """

    def __init__(self, request: Request, replan: Replan | None) -> None:
        self.request = request
        self._restarts = request.restarts
        self._all = request.computing
        self.min_workers = self._restarts.min_workers or len(self._all)
        self._replan = replan
        self._dropped: frozenset[str] = frozenset()
        self._rows = FailureRows(self._restarts.settled_secs)

    def drop_failed(self, outcome: Outcome) -> bool:
        """Removes workers that failed too often from `request`; returns True if the next attempt starts at once."""
        given_up = self._given_up(outcome)
        if not given_up or not self._replan or len(self._left) - len(given_up) < self.min_workers:
            return False
        self._dropped |= given_up
        self.request = self._replan(self._dropped)
        # A job with parameter servers whose chief has failed restarts as usual, without these workers.
        return outcome.goes_on or not self.request.replaces_workers

    @property
    def _left(self) -> list[str]:
        return [name for name in self._all if name not in self._dropped]

    def _given_up(self, outcome: Outcome) -> set[str]:
        """Returns the workers that failed too often, by their names in the whole job."""
        names = dict(zip(self.request.computing, self._left, strict=True))
        failed = outcome.failed
        if failed is None or self.request.replaces_workers:
            return {names[name] for name in outcome.given_up}
        if failed.ran_secs >= self._restarts.settled_secs:
            self._rows = FailureRows(self._restarts.settled_secs)  # All tasks had started by then.
        if failed.name not in names or outcome.code == TRY_AGAIN_EXIT_CODE:
            return set()
        failures = self._rows.add(names[failed.name], failed.ran_secs)
        # With fewer restarts of all tasks than of one worker, the last of them decides.
        most = min(self._restarts.max_worker_restarts, self._restarts.max_restarts)
        return {names[failed.name]} if failures > most else set()

    def __str__(self) -> str:
        without = [name for name in self._all if name in self._dropped]
        return f"{len(self._left)} of {len(self._all)} workers, numbered anew, without {', '.join(without)}"


class _Quiet(Console):
    """Console that prints only the launcher's own lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def keeps_colours(self, error: bool) -> bool:
        return False

    def write(self, prefix: str, lines: Any, error: bool = False, number: int | None = None) -> None:
        if number is None:
            self._console.write(prefix, lines, error)


@contextlib.contextmanager
def _handling(notify: Callable[[int], None]) -> Iterator[None]:
    """Passes signals to `notify` within this block, except those that this process ignores (nohup)."""
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
