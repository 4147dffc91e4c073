# SPDX-License-Identifier: Apache-2.0
"""Runs one attempt at a job: starts its tasks, replaces workers, decides the exit code and stops all tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Sequence

from tfdist.launchers import reachability
from tfdist.launchers.notices import GIVEN_UP, Notices, not_joined
from tfdist.launchers.processes import Process, Supervisor
from tfdist.launchers.replacements import Replacements
from tfdist.launchers.requests import CAUSE_SECS, HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE, Request
from tfdist.launchers.startup_noise import StartupNoise
from tfdist.launchers.task_logs import TaskLogs

_SHOWN_LINES = 8
# A worker or ps that has lost the chief may fail before the launcher sees the end of the chief.
_VERDICT_SECS = 1.0
_REPLACE_SECS = 0.5
# Interval of the checks that all processes of a failed worker have ended and its output is read.
_SWEPT_SECS = 0.05
# Exit code of ssh when the connection failed or broke; a script may end with it, too.
_NO_CONNECTION = 255
# ssh has 15 s to connect; a process that ends within this time may never have started a remote task.
_CONNECT_SECS = 20.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of an attempt.

    Attributes:
      code: exit code of the job.
      failed: the task that failed first; None if no failure decided the result.
      given_up: names of workers that failed too often.
      goes_on: True if enough workers are left without these. All tasks must start again, because they wait for them.
      orphan_secs: time after which unreachable tasks have ended by themselves.
    """

    code: int
    failed: Process | None = None
    given_up: frozenset[str] = frozenset()
    goes_on: bool = False
    orphan_secs: float = 0.0


class Attempt:
    """One run of all tasks of a request.

    Args:
      request: the tasks to run.
      supervisor: starts and ends the tasks.
      received: signals to this process; the signal handler appends to it.
      number: number of this attempt, from 0.
      min_workers: least number of workers with which the attempt continues.
      logs: the log files of this attempt.
    """

    def __init__(
        self,
        request: Request,
        supervisor: Supervisor,
        received: list[int],
        number: int,
        min_workers: int,
        logs: TaskLogs | None,
    ) -> None:
        self._request = request
        self._supervisor = supervisor
        self._received = received
        self._number = number
        self._min_workers = min_workers
        self._logs = logs
        self._tasks = {task.name: task for task in request.tasks}
        self._replaced = frozenset(request.computing if request.replaces_workers else ())
        self._replacements = Replacements(request.restarts)
        self._latest: dict[str, Process] = {}
        # Lines by worker, written when the worker is started again: a worker that fails because the chief has ended
        # is not reported.
        self._restart_lines: dict[str, str] = {}
        # Workers that ran long enough to have met the chief.
        self._settled: set[str] = set()
        self._given_up: set[str] = set()
        self._goes_on = False
        self._undecided = set(request.deciding)
        # Tasks that run, or will be started again.
        self._pending = set(self._tasks)
        self._failed: Process | None = None
        self._deadline = math.inf
        # Reasons by unreachable host; hosts where tasks may still run.
        self._unreachable: dict[str, str] = {}
        self._orphaned: list[str] = []
        self._notices = Notices()

    def run(self) -> Outcome:
        """Runs all tasks to their end."""
        with contextlib.closing(self._notices):
            return self._run()

    def _run(self) -> Outcome:
        try:
            for name in self._tasks:
                self._start(name)
        except OSError as error:
            self._say(f"a task could not be started: {error}")
            return Outcome(1)
        self._follow()
        if not self._undecided:
            self._let_others_end()
            self._look_for_a_cluster()
        elif self._failed is not None and not self._received and self._failed.returncode not in HOPELESS_EXIT_CODES:
            self._look_for_lost_hosts(self._failed)
        if self._failed is not None and self._undecided and not self._received and self._supervisor.running:
            # Before what the others print because they miss this task; the same again is the last line.
            self._say(f"{self._failed.name} failed first ({self._how_with_host(self._failed)}); ending all tasks")
        if self._received:
            return Outcome(self._end_interrupted(self._received[0]))
        self._end([signal.SIGTERM])
        if not self._undecided or self._failed is None:
            return Outcome(0)
        where = [f"its output is below {self._logs.folder}"] if self._logs else []
        self._say(*self._failure_lines(self._failed), *where)
        given_up = frozenset(self._given_up)
        return Outcome(self._code(self._failed), self._failed, given_up, self._goes_on, self._orphan_secs())

    def _start(self, name: str) -> None:
        task, restart = self._tasks[name], self._latest[name].restart + 1 if name in self._latest else 0
        more = {"TFDIST_ATTEMPT": str(self._number), "TFDIST_TASK_RESTART": str(restart)}
        more |= self._notices.env
        self._latest[name] = self._supervisor.start(name, task.command, {**os.environ, **task.env, **more})

    def _follow(self) -> None:
        """Waits until the result is decided: all deciding tasks have succeeded, or `_failed` is the first failure."""
        while self._undecided and self._pending and not self._received and time.monotonic() < self._deadline:
            ended = self._supervisor.wait_first_exit(self._wait_secs())
            if ended is None:
                self._start_due()
            elif ended.returncode == 0:
                self._pending.discard(ended.name)
                self._undecided.discard(ended.name)
            elif ended.name in self._replaced:
                self._replace(ended, ended.ran_secs)
            else:
                self._fail(ended)

    def _wait_secs(self) -> float | None:
        if self._failed is not None:
            return max(0.0, self._deadline - time.monotonic())
        return self._replacements.wait_secs()

    def _fail(self, ended: Process) -> None:
        """Notes a failure, and sets the deadline until which another task may turn out to be the cause."""
        self._pending.discard(ended.name)
        decides = ended.name in self._undecided
        if self._failed is None:
            secs = CAUSE_SECS if ended.returncode == TRY_AGAIN_EXIT_CODE else 0.0 if decides else _VERDICT_SECS
            self._failed, self._deadline = ended, time.monotonic() + secs
        elif self._failed.returncode == TRY_AGAIN_EXIT_CODE != ended.returncode:
            self._failed, self._deadline = ended, 0.0
        elif decides and self._failed.returncode != TRY_AGAIN_EXIT_CODE:
            # Not after a preemption: preempted tasks end one after the other, the one that saves last.
            self._deadline = 0.0

    def _replace(self, ended: Process, ran_secs: float) -> None:
        """Schedules the restart of a worker, or gives it up."""
        if self._failed is not None:
            return  # The attempt is about to end.
        if ran_secs >= self._request.restarts.settled_secs:
            self._settled.add(ended.name)
        # A worker that has lost the chief ends with this code. Then the chief's end decides, which may be seen later.
        least_secs = CAUSE_SECS if ended.returncode == TRY_AGAIN_EXIT_CODE else _REPLACE_SECS
        failures, secs = self._replacements.failed(ended.name, ran_secs, least_secs)
        text = f"{ended.name} failed ({self._how(ended)}, failure {failures} in a row)"
        if secs is None:
            self._give_up(ended, failures)
        elif secs > least_secs:
            self._say(*_muted_lines(ended), f"{text}; starting it again in {secs:g} s")
        else:
            self._restart_lines[ended.name] = f"{text}; starting it again"

    def _start_due(self) -> None:
        if self._failed is not None or self._received:
            return
        for name in self._replacements.due():
            ended = self._latest[name]
            if ended.wait(0) is None:
                self._replacements.postpone(name, _SWEPT_SECS)
                continue
            if text := self._restart_lines.pop(name, ""):
                self._say(*_muted_lines(ended), text)
            if self._logs:
                self._logs.close_task(name)
            try:
                self._start(name)
            except OSError as error:
                self._say(f"{name} could not be started: {error}")
                self._replace(ended, ran_secs=0.0)

    def _give_up(self, ended: Process, failures: int) -> None:
        self._given_up.add(ended.name)
        left, all_of_them = len(self._replaced) - len(self._given_up), len(self._replaced)
        text = f"{ended.name} is given up ({self._how(ended)}, failure {failures} in a row)"
        if left >= self._min_workers and ended.name in self._settled:
            # The chief has met this worker, and can continue without it.
            self._pending.discard(ended.name)
            ended.wait(_VERDICT_SECS)  # Its last output may still arrive.
            self._say(*_last_lines(ended), f"{text}; going on with {left} of {all_of_them} workers")
            self._notices.add(GIVEN_UP + ended.name)
            return
        self._goes_on = left >= self._min_workers
        self._say(text)
        self._fail(ended)

    def _look_for_a_cluster(self) -> None:
        """Reports that no task has joined the cluster. Tasks on other hosts are looked at there."""
        members = {*self._request.deciding, *self._request.computing}
        is_here = all("TF_CONFIG" in task.env for task in self._request.tasks)
        if is_here and len(members) > 1 and not self._received and not self._notices.has_joined:
            self._say(not_joined(len(self._request.tasks), self._request.replaces_workers))

    # Hosts that are lost.

    def _look_for_lost_hosts(self, failed: Process) -> None:
        """Finds a lost host, and makes its task the first failure instead of a task that has lost this peer.

        The peer fails at once. The launcher's own connection to the lost host is only silent, and breaks half a minute
        later.
        """
        probes = {}
        for name, task in self._tasks.items():
            if task.probe and (self._latest[name].poll() is None or self._latest[name].returncode == _NO_CONNECTION):
                probes[task.host] = task.probe
        self._unreachable = reachability.unreachable(probes, lambda: bool(self._received))
        lost = [name for name in self._tasks if self._host(name) in self._unreachable]
        # A process that ended sooner never had a connection.
        left = [
            name for name in lost if self._latest[name].poll() is None or self._latest[name].ran_secs > _CONNECT_SECS
        ]
        self._orphaned = list(dict.fromkeys(map(self._host, left)))
        if len(self._unreachable) == len({task.host for task in self._tasks.values()}) > 1:
            self._say("no host can be reached: the link of this machine may be down")
        if not lost or self._host(failed.name) in self._unreachable:
            return
        self._failed = self._latest[next((name for name in lost if name in self._undecided), lost[0])]
        self._say(f"{failed.name} failed ({self._how(failed)}), as it misses {self._failed.name}")

    def _host(self, name: str) -> str:
        return self._tasks[name].host

    def _code(self, failed: Process) -> int:
        return _NO_CONNECTION if self._host(failed.name) in self._unreachable else _exit_code(failed)

    def _orphan_secs(self) -> float:
        return self._request.orphan_secs if self._orphaned else 0.0

    def _how(self, ended: Process) -> str:
        host = self._host(ended.name)
        return f"{_how(ended)}, host {host}" if host and ended.returncode == _NO_CONNECTION else _how(ended)

    def _failure_lines(self, failed: Process) -> list[str]:
        """Returns the failed task's last lines, then the cause, which is the last line on the screen."""
        ended = "all tasks have ended"
        if secs := self._orphan_secs():
            ended = (
                f"all others have ended, and those on {', '.join(self._orphaned)} end by themselves within {secs:g} s"
            )
        tracebacks = self._supervisor.tracebacks
        several = [f"the same {kind} in {self._named(names)}" for kind, names in tracebacks.raised_by_several()]
        # What a task has raised is on the screen already.
        last = [] if tracebacks.has_raised(failed.name) and not failed.is_muted else _last_lines(failed)
        how = self._how_with_host(failed)
        return [*several, *last, f"{failed.name} failed first ({how}); {ended}{self._advice(failed)}"]

    def _named(self, names: Sequence[str]) -> str:
        if len(names) < len(self._tasks):
            return ", ".join(names)
        kind = "workers" if all(name.startswith("worker") for name in names) else "tasks"
        return f"all {len(names)} {kind}"

    def _how_with_host(self, failed: Process) -> str:
        host = self._host(failed.name)
        reason = self._unreachable.get(host)
        return f"its host {host} can't be reached: {reason}" if reason else self._how(failed)

    def _advice(self, failed: Process) -> str:
        """Says how a job goes on that was killed, if nobody starts it again: a bug of the script would come again."""
        was_killed = (failed.returncode or 0) < 0 or self._host(failed.name) in self._unreachable
        if self._request.restarts.max_restarts or not was_killed:
            return ""
        return "; start with --max_restarts=N and tfdist.callbacks.Resume to go on from a checkpoint"

    def _let_others_end(self) -> None:
        """Waits for the other tasks after success. The chief has notified them; their exit codes don't count."""
        settled_secs = self._request.restarts.settled_secs
        # Restarted tasks may not have met the chief before it ended, and would wait for it.
        late = [each for each in self._supervisor.running if each.restart and each.ran_secs < settled_secs]
        for process in late:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._request.grace_secs
        while set(self._supervisor.running) - set(late) and not self._received and time.monotonic() < deadline:
            self._supervisor.wait_first_exit(deadline - time.monotonic())
        for process in late:
            process.send_signal(signal.SIGKILL)

    def _end_interrupted(self, signum: int) -> int:
        self._supervisor.tracebacks.is_interrupted = signum == signal.SIGINT
        if signum != signal.SIGPIPE:
            self._say(f"{_signal_name(signum)}: ending all tasks")
        # SIGINT comes first, as from Ctrl-C in a terminal: a script may catch KeyboardInterrupt and save its work.
        # Only the first signal is handled so: a second one may have arrived while the line was written.
        self._end([signal.SIGINT, signal.SIGTERM] if signum == signal.SIGINT else [signal.SIGTERM], answered=1)
        return 128 + signum

    def _end(self, signals: Sequence[int], answered: int = 0) -> None:
        """Ends all tasks; kills them at once if more signals than `answered` have arrived."""
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


def _exit_code(process: Process) -> int:
    code = process.returncode or 0
    return code if code >= 0 else 128 - code


def _how(process: Process) -> str:
    code = process.returncode or 0
    return f"exit code {code}" if code > 0 else f"{_signal_name(-code)}, exit code {_exit_code(process)}"


def _last_lines(failed: Process) -> list[str]:
    lines = [line for line in StartupNoise({}).without(failed.tail) if line.strip()]
    # The output of a muted task was not printed, so that all that is left of it is shown.
    shown = lines if failed.is_muted else lines[-_SHOWN_LINES:]
    title = [f"the last lines of {failed.name}:"] if shown else []
    return [*title, *(f"  {line}" for line in shown)]


def _muted_lines(ended: Process) -> list[str]:
    return _last_lines(ended) if ended.is_muted else []


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
