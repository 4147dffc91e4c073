# SPDX-License-Identifier: Apache-2.0
"""Runs one attempt at a job: starts its tasks, replaces workers, decides the exit code and stops all tasks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launchers.requests import HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE, Request, make_folder, shell_code
from tfdist.launchers.supervise.notices import ENDED, GIVEN_UP, Notices, not_joined
from tfdist.launchers.supervise.output import Console, LogSettings, TaskLogs, without_noise
from tfdist.launchers.supervise.processes import Process, Start, Supervisor, on_signals, start_guard
from tfdist.launchers.supervise.replacements import FailureRows, Replacements
from tfdist.launchers.supervise.verdict import CAUSE_SECS, LEAST_SECS, FirstFailure

_SHOWN_LINES = 8
_TASKS = re.compile(r"\b(?:chief|worker|ps):\d+\b")
_REPLACE_SECS = 0.5
# Interval of the checks that all processes of a failed worker have ended and its output is read.
_SWEPT_SECS = 0.05
# Exit code of ssh when the connection failed or broke; a script may end with it, too.
_NO_CONNECTION = 255
# ssh has 15 s to connect; a process that ends within this time may never have started a remote task.
_CONNECT_SECS = 20.0
# More than a script needs to import TensorFlow on a busy machine, and to build its strategy.
_JOIN_SECS = 120.0
# After so many logins to a host the next ones wait.
_LOGINS, _LOGINS_SECS = 8, 1.0


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
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
        self._first = FirstFailure()
        # Reasons by unreachable host; hosts where tasks may still run.
        self._unreachable: dict[str, str] = {}
        self._orphaned: list[str] = []
        # Of those the ends were looked at.
        self._handled: set[Process] = set()
        self._notices = Notices()
        # When a job that no task has joined is reported, while it runs.
        self._look_secs: float | None = time.monotonic() + _JOIN_SECS

    def run(self) -> AttemptOutcome:
        """Runs all tasks to their end."""
        with contextlib.closing(self._notices):
            return self._run()

    def _run(self) -> AttemptOutcome:
        try:
            hosts = collections.Counter[str]()
            for name, task in self._tasks.items():
                hosts[task.host] += 1
                # sshd drops logins at random where more than 10 wait (MaxStartups).
                if task.host and hosts[task.host] % _LOGINS == 0:
                    time.sleep(_LOGINS_SECS)
                self._start(name)
        except OSError as error:
            self._say(f"a task could not be started: {error}")
            return AttemptOutcome(1)
        self._follow()
        if not self._undecided:
            self._let_others_end()
            self._look_for_a_cluster()
        elif self._failed is not None and not self._received and self._failed.returncode not in HOPELESS_EXIT_CODES:
            self._look_for_lost_hosts(self._failed)
        if self._failed is not None and self._undecided and not self._received and self._supervisor.running:
            # Before what the others print because they miss this task; the same again is the last line.
            self._say(f"{self._cause(self._failed)}; ending all tasks")
        if self._received:
            return AttemptOutcome(self._end_interrupted(self._received[0]))
        self._end([signal.SIGTERM])
        if not self._undecided or self._failed is None:
            return AttemptOutcome(0)
        where = [f"its output is below {self._logs.folder}"] if self._logs else []
        *before, cause = self._failure_lines(self._failed)
        self._say(*before, *where, cause)
        given_up = frozenset(self._given_up)
        return AttemptOutcome(self._code(self._failed), self._failed, given_up, self._goes_on, self._orphan_secs())

    def _start(self, name: str) -> None:
        task, restart = self._tasks[name], self._latest[name].restart + 1 if name in self._latest else 0
        more = {"TFDIST_ATTEMPT": str(self._number), "TFDIST_TASK_RESTART": str(restart), **self._notices.env}
        self._latest[name] = self._supervisor.start(name, task.command, {**os.environ, **task.env, **more})

    def _follow(self) -> None:
        """Waits until the result is decided: all deciding tasks have succeeded, or `_failed` is the first failure."""
        while self._undecided and self._pending and not self._received and not self._first.is_decided(time.monotonic()):
            ended = self._supervisor.wait_first_exit(self._wait_secs())
            if ended is None:
                self._start_due()
                is_due = self._look_secs is not None and time.monotonic() >= self._look_secs
                if is_due and self._failed is None:
                    self._look_secs = None
                    self._look_for_a_cluster(_JOIN_SECS)
                continue
            self._handled.add(ended)
            if ended.returncode == 0:
                self._notices.add(ENDED + ended.name)
                self._pending.discard(ended.name)
                self._undecided.discard(ended.name)
            elif ended.name in self._replaced:
                self._replace(ended, ended.ran_secs)
            else:
                self._fail(ended)

    def _wait_secs(self) -> float | None:
        if self._failed is not None:
            return max(0.0, self._first.deadline_secs - time.monotonic())
        look_secs = None if self._look_secs is None else max(0.0, self._look_secs - time.monotonic())
        return min((secs for secs in (self._replacements.wait_secs(), look_secs) if secs is not None), default=None)

    def _fail(self, ended: Process) -> None:
        """Notes a failure, which may be the cause of the job's end, or a consequence of it."""
        self._pending.discard(ended.name)
        raised, decides = self._supervisor.tracebacks.raised_secs, ended.name in self._undecided
        before = {name for name, each in self._latest.items() if each in self._handled and each is not ended}
        raised = {name: secs for name, secs in raised.items() if name not in before}
        errors = [line for line in ended.tail if line.startswith("ConnectionError: ")]
        lacks = any({*_TASKS.findall(line)} - {ended.name} for line in errors)
        about = {"decides": decides, "raised_secs": raised, "is_consequence": lacks}
        self._first.ended(ended.name, ended.returncode, time.monotonic(), **about)
        if self._first.failure and self._first.failure.task == ended.name:
            self._failed = ended

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
            ended.wait(LEAST_SECS)  # Its last output may still arrive.
            self._say(*_last_lines(ended), f"{text}; going on with {left} of {all_of_them} workers")
            self._notices.add(GIVEN_UP + ended.name)
            return
        self._goes_on = left >= self._min_workers
        self._say(text)
        self._fail(ended)

    def _look_for_a_cluster(self, after_secs: float | None = None) -> None:
        """Reports that no task has joined the cluster, in good time or at the end. Other hosts do it there."""
        members = {*self._request.deciding, *self._request.computing}
        is_here = all("TF_CONFIG" in task.env for task in self._request.tasks)
        if is_here and len(members) > 1 and not self._received and not self._notices.has_joined:
            self._say(not_joined(len(self._request.tasks), self._request.replaces_workers, after_secs))

    # Hosts that are lost.

    def _look_for_lost_hosts(self, failed: Process) -> None:
        """Finds a lost host, and makes its task the first failure instead of a task that has lost this peer.

        The peer fails at once. The launcher's own connection to the lost host is only silent, and breaks half a minute
        later.
        """
        silent = [task for name, task in self._tasks.items() if self._latest[name].returncode in (None, _NO_CONNECTION)]
        probes = {task.host: task.probe for task in silent if task.probe}
        self._unreachable = unreachable(probes, lambda: bool(self._received))
        lost = [name for name in self._tasks if self._host(name) in self._unreachable]
        # A process that ended sooner never had a connection.
        processes = [self._latest[name] for name in lost]
        left = [each.name for each in processes if each.returncode is None or each.ran_secs > _CONNECT_SECS]
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
        return _NO_CONNECTION if self._host(failed.name) in self._unreachable else shell_code(failed.returncode)

    def _orphan_secs(self) -> float:
        return self._request.orphan_secs if self._orphaned else 0.0

    def _how(self, ended: Process) -> str:
        code, host = ended.returncode or 0, self._host(ended.name)
        if host and code == _NO_CONNECTION:
            return f"exit code {code}, host {host}"
        return f"exit code {code}" if code > 0 else f"{_signal_name(-code)}, exit code {shell_code(code)}"

    def _failure_lines(self, failed: Process) -> list[str]:
        """Returns the failed task's last lines, then the cause, which is the last line on the screen."""
        ended = "all tasks have ended"
        if secs := self._orphan_secs():
            ended = (
                f"all others have ended, and those on {', '.join(self._orphaned)} end by themselves within {secs:g} s"
            )
        tracebacks = self._supervisor.tracebacks
        several = [f"the same {kind} in {self._named(names)}" for kind, names in tracebacks.raised_by_several()]
        if failed.returncode == TRY_AGAIN_EXIT_CODE:
            return [*several, f"{self._cause(failed)}; {ended}"]
        # Exceptions of tasks are on the screen already.
        last = [] if tracebacks.has_raised(failed.name) and not failed.is_muted else _last_lines(failed)
        return [*several, *last, f"{self._cause(failed)}; {ended}{self._advice(failed)}"]

    def _cause(self, failed: Process) -> str:
        if failed.returncode == TRY_AGAIN_EXIT_CODE:
            return f"{failed.name} was preempted, and the work is saved (exit code {TRY_AGAIN_EXIT_CODE})"
        host = self._host(failed.name)
        reason = self._unreachable.get(host)
        how = f"its host {host} can't be reached: {reason}" if reason else self._how(failed)
        return f"{failed.name} failed first ({how})"

    def _named(self, names: Sequence[str]) -> str:
        if len(names) < len(self._tasks):
            return ", ".join(names)
        kind = "workers" if all(name.startswith("worker") for name in names) else "tasks"
        return f"all {len(names)} {kind}"

    def _advice(self, failed: Process) -> str:
        """Advises on a killed job that no launcher starts again: a bug of the script would come again."""
        is_lost = self._host(failed.name) in self._unreachable
        was_killed = (failed.returncode or 0) < 0 or is_lost
        is_sigkill = failed.returncode == -signal.SIGKILL and not is_lost
        cause = "; unless you sent it, memory may have run out" if is_sigkill else ""
        if self._request.restarts.max_restarts or not was_killed:
            return cause
        return f"{cause}; start with --max_restarts=N and tfdist.callbacks.Resume to go on from a checkpoint"

    def _let_others_end(self) -> None:
        """Waits for the other tasks after success. The chief has notified them; their exit codes don't count."""
        settled_secs = self._request.restarts.settled_secs
        # Restarted tasks may not have met the chief before it ended, and would wait for it.
        late = [each for each in self._supervisor.running if each.restart and each.ran_secs < settled_secs]
        for process in late:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._request.grace_secs
        while set(self._supervisor.running) - set(late) and not self._received:
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._supervisor.wait_first_exit(left)
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


def _last_lines(failed: Process) -> list[str]:
    lines = [line for line in without_noise(failed.tail) if line.strip()]
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


# Runs the processes of a request to their end: in several attempts, and with fewer workers if some are given up.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Returns the request for the same job without some workers, by their names in the whole job.
Replan = Callable[[frozenset[str]], Request]


def run_tasks(
    request: Request,
    logs: LogSettings = LogSettings(),  # noqa: B008 - frozen
    replan: Replan | None = None,
    start: Start = start_guard,
) -> int:
    """Runs the tasks to their end and prints their output; after a failure, ends all tasks and restarts them.

    Args:
      request: the tasks to run.
      logs: log settings.
      replan: returns the request for the same job without some workers, by their names in `request`. None if the job
        can't run with fewer workers.
      start: starts each task; on this machine by default.

    Returns:
      0 if all deciding tasks succeeded. Else the code of the task that failed first in the last attempt (128+N if
      signal N ended it). After Ctrl-C 130, and after another signal N to this process 128+N.

    Raises:
      LaunchError: the directory for the logs can't be made.
    """
    submission = _Submission(request, logs, _RemainingWorkers(request, replan), start)
    is_main = threading.current_thread() is threading.main_thread()
    # Those that this process ignores (nohup) stay ignored.
    signals = [each for each in _SIGNALS if is_main and signal.getsignal(each) is not signal.SIG_IGN]
    with on_signals(signals, submission.notify):
        return submission.run()


class _Submission:
    """All attempts of a request."""

    def __init__(self, request: Request, logs: LogSettings, workers: _RemainingWorkers, start: Start) -> None:
        self._start = start
        self._restarts = request.restarts
        self._workers = workers
        self._logs = logs
        # By default a name that sorts by time, and is unique among the launchers on this machine.
        run = logs.run or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._folder = pathlib.Path(logs.task_logs, run) if logs.task_logs else None
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
                backoff_secs, why = restarts.restart_backoff_secs, f"preemption {preemptions}"
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

    def _gives_up(self, outcome: AttemptOutcome, flag: str, most: int) -> int:
        if most:  # With a limit of 0 the user expects no restart.
            self._say(f"not starting again: {flag}={most} is used up")
        return outcome.code

    def _attempt(self, number: int) -> AttemptOutcome:
        logs = TaskLogs(self._folder, number, self._say) if self._folder else None
        if logs:
            make_folder("--task_logs", logs.folder)
        workers = self._workers
        shown = workers.request.reporting if self._logs.quiet_workers else None
        with Supervisor(self._console, logs and logs.write, shown if self._logs.tee else (), self._start) as supervisor:
            self._supervisor = supervisor
            return Attempt(workers.request, supervisor, self._received, number, workers.min_workers, logs).run()

    def _pause(self, secs: float) -> bool:
        """Waits for `secs`; returns False once a signal has arrived, which wakes the supervisor."""
        deadline = time.monotonic() + secs
        while self._supervisor and not self._received and time.monotonic() < deadline:
            self._supervisor.wait_first_exit(max(0.0, deadline - time.monotonic()))
        return not self._received

    def _say(self, *lines: str) -> None:
        self._console.say(lines)


class _RemainingWorkers:
    """The remaining workers of a job. `str` returns their number, and the names of the dropped ones.

    Args:
      request: request for the whole job.
      replan: see `run_tasks`.

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

    def drop_failed(self, outcome: AttemptOutcome) -> bool:
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

    def _given_up(self, outcome: AttemptOutcome) -> set[str]:
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


# Finds the unreachable hosts of a job, because a lost host may be the cause of another task's failure.

# Equals ssh's ConnectTimeout for starting a task.
_ANSWER_SECS = 15.0
_LOOK_SECS = 0.05
# Exit code of a guard that can't run its command.
_NO_PROGRAM = 127


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
    with Supervisor() as supervisor:
        for host, command in probes.items():
            with contextlib.suppress(OSError):  # Without a process for it, nothing is known of the host.
                supervisor.start(host, command)
        deadline = time.monotonic() + _ANSWER_SECS
        while supervisor.running and time.monotonic() < deadline and not is_interrupted():
            supervisor.wait_first_exit(_LOOK_SECS)
        reasons = {process.name: f"it does not answer within {_ANSWER_SECS:g} s" for process in supervisor.running}
        supervisor.stop(signals=())
        for process in supervisor.processes:
            # A command that can't be started says nothing of the host, and one that refuses the login is there.
            is_refused = any("Permission denied" in line for line in process.tail)
            if process.name not in reasons and process.returncode not in (0, _NO_PROGRAM) and not is_refused:
                reasons[process.name] = process.tail[-1][:200] if process.tail else f"exit code {process.returncode}"
    return {} if is_interrupted() else reasons
