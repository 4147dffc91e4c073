# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive this one, with their output in whole, prefixed lines. No TensorFlow import.

    with Supervisor() as supervisor:
        supervisor.start("worker:0", [sys.executable, "train.py"], env)
        supervisor.start("worker:1", [sys.executable, "train.py"], env)
        first = supervisor.wait_first_exit()

Every task runs under a guard (`_guard.py`) in a session of its own. Whatever ends this process, SIGKILL included, ends
the tasks and everything that they started, also what put itself into another process group or session.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.launchers.output import Console, LineReader
from tfdist.launchers.startup_noise import StartupNoise

_GUARD = str(pathlib.Path(__file__).resolve().with_name("_guard.py"))
_TAIL_LINES = 20
# How long the last words of a task are read after its guard is gone: longer only if something survived that.
_DRAIN_SECS = 2.0
_KILL_WAIT_SECS = 6.0


class Process:
    """One running task. Made by `Supervisor.start`.

    Attributes:
      name: what it is called in messages, such as "worker:1".
      command: program and arguments.
      restart: how many of this name the supervisor had started before.
      returncode: None while it runs; then its exit code, or -N if signal N ended it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        on_lines: Callable[[Process, list[str], bool], None],
        on_exit: Callable[[Process], None],
        keeps_colours: Callable[[bool], bool],
        restart: int = 0,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.restart = restart
        self.returncode: int | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._pid: int | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._on_lines = on_lines
        self._on_exit = on_exit
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._over = threading.Event()
        self._readers = {error: LineReader(keeps_colours(error)) for error in (False, True)}
        self._control, self._guard = _start_guard(self.command, env)
        self._messages = b""
        self._swept = False
        threading.Thread(target=self._follow, name=f"tfdist output of {name}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Process id of the task itself, which is also its process group; None if it never started."""
        self._started.wait()
        return self._pid

    @property
    def tail(self) -> list[str]:
        """The last lines that it printed."""
        return list(self._tail)

    @property
    def ran_secs(self) -> float:
        """For how long it has run."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def poll(self) -> int | None:
        """The return code, or None while it runs."""
        return self.returncode

    def wait(self, timeout_secs: float | None = None) -> int | None:
        """Waits until the task, all that it started and its output are through; None if that takes too long."""
        return self.returncode if self._over.wait(timeout_secs) else None

    def send_signal(self, signum: int) -> None:
        """Signals the task's whole process group, if it still runs."""
        if os.getpid() != self._owner:
            return  # A forked copy of this program must not end the tasks of the original.
        with self._lock:
            if not self._over.is_set():
                with contextlib.suppress(OSError):
                    self._control.send(bytes([signum]))

    def _follow(self) -> None:
        """Reads what the task prints and what its guard reports, until both are through."""
        with selectors.DefaultSelector() as selector:
            for source, error in zip(self._sources(), (False, True, None), strict=True):
                selector.register(source, selectors.EVENT_READ, error)
            deadline = None
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                for key, _ in selector.select(None if deadline is None else 0.1):
                    data = _read(key.fd)
                    if data:
                        self._receive(key.data, data)
                        continue
                    selector.unregister(key.fileobj)
                    if key.data is None:
                        deadline = time.monotonic() + _DRAIN_SECS
                        self._guard_is_gone()
        self._finish()

    def _sources(self) -> list[Any]:
        return [self._guard.stdout, self._guard.stderr, self._control]

    def _receive(self, error: bool | None, data: bytes) -> None:
        if error is not None:
            self._print(error, self._readers[error].feed(data))
            return
        *messages, self._messages = (self._messages + data).split(b"\n")
        for message in messages:
            word, _, number = message.partition(b" ")
            if word == b"pid":
                self._pid = int(number)
                self._started.set()
            elif word == b"exit":
                self._exited(int(number))
            self._swept = word == b"done"

    def _print(self, error: bool, lines: list[str]) -> None:
        if lines:
            self._tail.extend(lines)
            self._on_lines(self, lines, error)

    def _exited(self, code: int) -> None:
        if self.returncode is None:
            self._ended_at = time.monotonic()
            self.returncode = code
            self._on_exit(self)

    def _guard_is_gone(self) -> None:
        """If somebody killed the guard, the kernel killed the task; the rest of its group is left to us."""
        if self._swept or self._pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _finish(self) -> None:
        for error, reader in self._readers.items():
            self._print(error, reader.close())
        code = self._guard.wait()
        # Before `_over`: who waits for that reads the return code at once.
        self._exited(code if code < 0 else -signal.SIGKILL)
        with self._lock:
            self._over.set()
            self._control.close()
        for stream in self._sources()[:2]:
            stream.close()
        self._started.set()


def _start_guard(
    command: Sequence[str], env: Mapping[str, str] | None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), *command],
            bufsize=0,
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, guard


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


class Supervisor:
    """Starts tasks, prints what they print, says who ended first, and ends the others.

    Args:
      console: where output goes, each line behind "[name] "; None keeps it off the screen (the end of it is in
        `Process.tail`).
      on_lines: called with a task, lines that it printed and whether to standard error, from any thread.
    """

    def __init__(
        self, console: Console | None = None, on_lines: Callable[[Process, list[str], bool], None] | None = None
    ) -> None:
        self._console = console
        self._on_lines = on_lines
        self._owner = os.getpid()
        self._processes: list[Process] = []
        self._exits: queue.SimpleQueue[Process | None] = queue.SimpleQueue()

    @property
    def processes(self) -> tuple[Process, ...]:
        """Everything started here, in order."""
        return tuple(self._processes)

    @property
    def running(self) -> tuple[Process, ...]:
        """What has not ended yet."""
        return tuple(process for process in self._processes if process.poll() is None)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Starts one task.

        Args:
          name: what it is called, such as "worker:1". One of this name may have been started before.
          command: program and arguments.
          env: its whole environment; this process' own by default.

        Raises:
          OSError: the system refuses to start a process.
        """
        keeps_colours = self._console.keeps_colours if self._console else lambda error: False
        same = [number for number, process in enumerate(self._processes) if process.name == name]
        number = same[0] if same else len(self._processes)
        process = Process(name, command, env, self._printer(number, env), self._exits.put, keeps_colours, len(same))
        self._processes.append(process)
        return process

    def wait_first_exit(self, timeout_secs: float | None = None) -> Process | None:
        """The next task that ended, each one once, in the order in which they ended; None on timeout or `wake`.

        Its output may still be coming in: `Process.wait` waits for that.
        """
        try:
            return self._exits.get(timeout=timeout_secs)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Makes `wait_first_exit` return None. May be called from a signal handler."""
        self._exits.put(None)

    def say(self, lines: Sequence[str]) -> None:
        """Writes lines of the launcher's own to standard error."""
        if self._console:
            self._console.write("tfdist: ", lines, error=True)

    def stop(self, signals: Sequence[int] = (signal.SIGTERM,), grace_secs: float = 3.0) -> bool:
        """Ends every task and what it started; does nothing the second time, nor in a forked copy of this program.

        Args:
          signals: sent one after the other, sharing the time evenly, until all have ended.
          grace_secs: time until SIGKILL.

        Returns:
          Whether nothing is left. Only a process stuck inside the kernel survives SIGKILL.
        """
        if os.getpid() != self._owner:
            return True
        for signum in signals:
            if self._ended_after(signum, grace_secs / len(signals)):
                return True
        return self._ended_after(signal.SIGKILL, _KILL_WAIT_SECS)

    def _ended_after(self, signum: int, timeout_secs: float) -> bool:
        for process in self._processes:
            process.send_signal(signum)
        deadline = time.monotonic() + timeout_secs
        return all(_through(process, deadline) for process in self._processes)

    def _printer(self, number: int, env: Mapping[str, str] | None) -> Callable[[Process, list[str], bool], None]:
        noise = {error: StartupNoise(env) for error in (False, True)}

        def show(process: Process, lines: list[str], error: bool) -> None:
            if self._on_lines:
                self._on_lines(process, lines, error)
            if self._console:
                self._console.write(f"[{process.name}] ", noise[error].without(lines), error, number)

        return show

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()


def _through(process: Process, deadline: float) -> bool:
    return process.wait(max(0.0, deadline - time.monotonic())) is not None
