# SPDX-License-Identifier: Apache-2.0
"""Runs a script as the child of a task's wrapper, which forwards signals to it and returns its exit code."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from tfdist import _log
from tfdist.cluster import Task
from tfdist.launchers.requests import TRY_AGAIN_EXIT_CODE
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.notices import Notices, not_joined
from tfdist.launchers.supervise.output import Console, LineReader, StartupNoise

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")
_NOT_FOUND_EXIT_CODE = 127
_POLL_SECS = 1.0
# Time for a task that is no longer needed: to end by itself, and again to end after SIGTERM.
_OVER_SECS = 10.0
_DRAIN_SECS = 2.0
_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1


def about_cluster(code: int, task: Task, job: Shape, notices: Notices) -> None:
    """Says so if the first task of several has ended with code 0, and has not joined the cluster."""
    if code == 0 and task == job.members[0] and len(job.members) > 1 and not notices.has_joined:
        _log.say(not_joined(len(job.members), job.num_ps > 0))


def run_wrapped(
    command: Sequence[str],
    env: Mapping[str, str],
    on_exit: Callable[[int], None] | None = None,
    is_over: Callable[[], bool] | None = None,
    name: str | None = None,
    on_signal: Callable[[int], bool] | None = None,
    early: Sequence[int] = (),
    is_muted: bool = False,
) -> int:
    """Runs a command to its end.

    Some schedulers signal only the wrapper, others its process group or all processes. The command has a process group
    of its own, so that the wrapper forwards each signal once. The command is killed when the wrapper is killed.

    Args:
      command: program and arguments.
      env: variables added to the environment.
      on_exit: called with the exit code while the wrapper still handles signals.
      is_over: called every second. Once it returns True, the command has some time to end by itself, is ended then, and
        counts as successful.
      name: prefix of each line of output, such as "worker:1", for several tasks that share a file; progress bars are
        then printed as lines.
      on_signal: called with each signal; returns True to forward it, False if the scheduler has sent it to the command.
      early: earlier signals, which are forwarded once the command has started.
      is_muted: with `name`, prints only the last lines of a command that failed by itself, without a signal or the loss
        of another task.

    Returns:
      The exit code; 128+N if signal N ended the command.
    """
    tail: collections.deque[tuple[str, bool]] | None = collections.deque(maxlen=_TAIL_LINES) if is_muted else None
    prefix = f"[{name}] "
    with _Forwarding(on_signal, early) as forwarding:
        try:
            started = _start(command, {**os.environ, **env}, subprocess.PIPE if name else None)
        except OSError as error:
            _log.say(f"can't run {command[0]}: {error}")
            return _NOT_FOUND_EXIT_CODE
        try:
            readers = _print_lines(started, prefix, tail) if name else []
            forwarding.begin(started)
            code = _wait(started, is_over)
            for reader in readers:
                # With a timeout, because background processes of the command may keep writing.
                reader.join(_DRAIN_SECS)
            if tail and code not in (0, TRY_AGAIN_EXIT_CODE) and not forwarding.received:
                _print_tail(tail, prefix)
            if on_exit:
                on_exit(code)
            return code
        finally:
            if started.poll() is None:
                _kill(started, signal.SIGKILL)


class _Forwarding:
    """Handles signals within a block, if it is entered in the main thread, and forwards them to the command.

    Args:
      on_signal: see `run`.
      early: earlier signals.

    Attributes:
      received: all signals so far, with the earlier ones.
    """

    def __init__(self, on_signal: Callable[[int], bool] | None, early: Sequence[int]) -> None:
        self.received = [*early]
        self._on_signal = on_signal
        self._child: subprocess.Popen[bytes] | None = None
        # Signals that came before the command had started.
        self._pending = [*early]
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Forwarding:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in _forwarded()}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self, child: subprocess.Popen[bytes]) -> None:
        """Forwards the signals so far, and from now on each signal at once."""
        self._child = child
        for signum in self._pending:
            _kill(child, signum)

    def _forward(self, signum: int, _: object) -> None:
        is_wanted = self._on_signal(signum) if self._on_signal else True
        self.received.append(signum)
        if self._child is None:
            self._pending.append(signum)
        elif is_wanted:
            _kill(self._child, signum)


def _forwarded() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _FORWARDED]


def _start(command: Sequence[str], env: Mapping[str, str], output: int | None) -> subprocess.Popen[bytes]:
    """Starts the command. Signals are blocked until its handlers are reset, so that none is lost."""
    wrapper, prctl = os.getpid(), _prctl()

    def become_task() -> None:
        # The kernel sends SIGKILL when the forking thread ends, which is the main thread or waits for the command.
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != wrapper:
            os._exit(1)
        for number in _forwarded():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, _forwarded())
    try:
        return subprocess.Popen(command, env=env, process_group=0, stdout=output, stderr=output, preexec_fn=become_task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prctl() -> Callable[..., Any]:
    """Returns the system call prctl, or outside of Linux a function that does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda *_: None
    call = ctypes.CDLL(None).prctl
    call.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return call


def _print_lines(
    child: subprocess.Popen[bytes], prefix: str, tail: collections.deque[tuple[str, bool]] | None
) -> list[threading.Thread]:
    """Starts threads that print both streams line by line until they end, or put the lines into `tail` instead."""
    console = Console()

    def show(lines: list[str], error: bool) -> None:
        if tail is None:
            console.write(prefix, lines, error)
        else:
            tail.extend((line, error) for line in lines if line.strip())

    def copy(stream: IO[bytes], error: bool) -> None:
        lines, noise = LineReader(), StartupNoise()
        while data := os.read(stream.fileno(), 1 << 16):
            show(noise.without(lines.feed(data)), error)
        show(noise.without(lines.close()), error)

    streams = [(stream, error) for stream, error in ((child.stdout, False), (child.stderr, True)) if stream]
    threads = [threading.Thread(target=copy, args=each, name="tfdist output", daemon=True) for each in streams]
    for thread in threads:
        thread.start()
    return threads


def _print_tail(tail: Iterable[tuple[str, bool]], prefix: str) -> None:
    _log.say(f"the last lines of {prefix.strip('[] ')}:")
    console = Console()
    # A copy, which is made at once: background processes of the command may still write.
    for line, error in list(tail):
        console.write(prefix, [line], error)


def _wait(child: subprocess.Popen[bytes], is_over: Callable[[], bool] | None) -> int:
    while is_over is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _code(child.wait(_POLL_SECS))
        if is_over():
            return _end(child)
    return _code(child.wait())


def _end(child: subprocess.Popen[bytes]) -> int:
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            _kill(child, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_OVER_SECS)
            break
    return 0


def _code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _kill(child: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)
