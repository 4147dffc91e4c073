# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive this process, with their output in complete, prefixed lines. No TensorFlow import.

    with Supervisor() as supervisor:
        supervisor.start("worker:0", [sys.executable, "train.py"], env)
        supervisor.start("worker:1", [sys.executable, "train.py"], env)
        first = supervisor.wait_first_exit()

Every task runs under a guard process (`guard.py`) in a session of its own. When this process ends, also by SIGKILL,
the guard ends the task and all of its descendants, including those in other process groups or sessions.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.launchers.supervise.output import TRACEBACK, Console, LineReader, TracebackFilter, Tracebacks, without_noise

# Runs a module of tfdist in a Python process that imports from the same places as this one. No TensorFlow import.
#
# `python -m` puts the working directory first on `sys.path`. A file `token.py` there would replace the standard
# library's module, even if the user's program never imports from there.

# The path is passed as JSON, which can hold any file name. -P keeps the working directory off `sys.path` until then.
_PROGRAM = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); runpy.run_module({!r}, None, '__main__')"
)
# Options of the interpreter, by their names in `sys.flags`.
_OPTIONS = {"optimize": "O", "dont_write_bytecode": "B", "ignore_environment": "E", "isolated": "I"}
_OPTIONS |= {"no_user_site": "s", "no_site": "S"}
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module with the interpreter, the options and the `sys.path` of this process."""
    options = [f"-{letter * getattr(sys.flags, flag)}" for flag, letter in _OPTIONS.items() if getattr(sys.flags, flag)]
    options += [f"-W{each}" for each in sys.warnoptions] + ["-Xutf8"] * sys.flags.utf8_mode
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # noqa: PTH100
    if _ROOT not in path:
        path.append(_ROOT)  # The program has found tfdist by other means.
    return [sys.executable, *options, "-P", "-c", _PROGRAM.format(module), json.dumps(path), *arguments]


# Reservation of free TCP ports of this machine until the tasks listen at them. No TensorFlow import.


class PortReservation:
    """Free ports, reserved against other programs.

    Each port is held by a socket that is bound but doesn't listen. On Linux a gRPC server of TensorFlow can still bind
    such a port, since both sides set SO_REUSEADDR. The kernel assigns it to no program that asks for *any* port, to
    listen or to connect. So the reservation can stay while the tasks start, and two launchers never use the same port.

    Args:
      count: number of ports.

    Raises:
      OSError: the machine has no free port left.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._sockets.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # On all interfaces, as TensorFlow's server: a port in use on one of them can't be used.
                held.bind(("", 0))
            self.ports: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)
        except OSError:
            self.release()
            raise
        if not sys.platform.startswith("linux"):
            self.release()  # Other systems can't bind a bound port again, so the port is free until the task starts.

    def release(self) -> None:
        """Releases the ports; may be called again."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


_GUARD = str(pathlib.Path(__file__).resolve().with_name("guard.py"))
_TAIL_LINES = 20
# Time limit for reading output after the guard has ended. Only a surviving descendant of the task uses it up.
_DRAIN_SECS = 2.0
_KILL_WAIT_SECS = 6.0

# Starts a task of this name; returns a socket, and the process at its other end which has the task's output. `guard.py`
# says what they tell each other.
Start = Callable[[str, Sequence[str], Mapping[str, str] | None], tuple[socket.socket, Any]]


class Process:
    """One running task, built by `Supervisor.start`.

    Attributes:
      name: name in messages, such as "worker:1".
      restart: number of tasks of this name that the supervisor had started before.
      is_muted: True if the output is not printed.
      returncode: None while the task runs; then its exit code, or -N if signal N ended it.
    """

    def __init__(
        self,
        name: str,
        guard: tuple[socket.socket, Any],
        printer: _Printer,
        on_exit: Callable[[Process], None],
        restart: int = 0,
        is_muted: bool = False,
    ) -> None:
        self.name = name
        self.is_muted = is_muted
        self.restart = restart
        self.returncode: int | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._pid: int | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._printer = printer
        self._on_exit = on_exit
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._over = threading.Event()
        self._readers = {error: LineReader() for error in (False, True)}
        self._control, self._guard = guard
        self._messages = b""
        self._swept = False
        threading.Thread(target=self._follow, name=f"tfdist output of {name}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Process id of the task, which is also its process group; None if it never started."""
        self._started.wait()
        return self._pid

    @property
    def tail(self) -> list[str]:
        """Last lines of the task's output."""
        return list(self._tail)

    @property
    def ran_secs(self) -> float:
        """Run time of the task so far, or until its end."""
        return (self._ended_at or time.monotonic()) - self._started_at

    def wait(self, timeout_secs: float | None = None) -> int | None:
        """Waits until the task and its descendants have ended and their output is read; returns None on timeout."""
        return self.returncode if self._over.wait(timeout_secs) else None

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the task's process group, if it still runs."""
        if os.getpid() != self._owner:
            return  # A forked copy of this program must not end the tasks of the original.
        with self._lock:
            if not self._over.is_set():
                with contextlib.suppress(OSError):
                    self._control.send(bytes([signum]))

    def _follow(self) -> None:
        """Reads the task's output and the guard's reports, until both have ended."""
        with selectors.DefaultSelector() as selector:
            for source, error in zip(self._sources(), (False, True, None), strict=True):
                selector.register(source, selectors.EVENT_READ, error)
            deadline = None
            while selector.get_map() and (deadline is None or time.monotonic() < deadline):
                is_busy = deadline is not None or self._printer.tracebacks.held
                for key, _ in selector.select(0.1 if is_busy else None):
                    data = b""
                    with contextlib.suppress(OSError):
                        data = os.read(key.fd, 1 << 16)
                    if data:
                        self._receive(key.data, data)
                        continue
                    selector.unregister(key.fileobj)
                    if key.data is None:
                        deadline = time.monotonic() + _DRAIN_SECS
                        self._guard_is_gone()
                self._printer.tick(self)
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
            self._printer.show(self, lines, error)

    def progress(self) -> list[str]:
        """Returns the present state of a progress bar that was not printed yet."""
        return self._readers[False].flush()

    def _exited(self, code: int) -> None:
        if self.returncode is None:
            self._ended_at = time.monotonic()
            self.returncode = code
            self._on_exit(self)

    def _guard_is_gone(self) -> None:
        """Kills the rest of the task's process group if the guard was killed; the kernel has killed the task itself."""
        if self._swept or self._pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _finish(self) -> None:
        for error, reader in self._readers.items():
            self._print(error, reader.close())
        self._printer.tick(self, is_end=True)
        code = self._guard.wait()
        # Before `_over`, because a thread that waits for `_over` then reads the return code.
        self._exited(code if code < 0 else -signal.SIGKILL)
        with self._lock:
            self._over.set()
            self._control.close()
        for stream in self._sources()[:2]:
            stream.close()
        self._started.set()


def start_guard(
    name: str, command: Sequence[str], env: Mapping[str, str] | None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a task on this machine, under its guard."""
    del name
    ours, theirs = socket.socketpair()
    try:
        words, pipe = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), *command], subprocess.PIPE
        guard = subprocess.Popen(
            words, bufsize=0, stdin=theirs.fileno(), stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, guard


class RemoteTask:
    """A task elsewhere, which two threads of this process follow in place of a guard. See `Start`.

    Args:
      name: name of the task.
      follow: runs the task, and writes its output to the files that it gets by descriptor; returns the exit code.
      pass_on: sends signals to the task, a byte for each; called with a zero byte after `beat_secs` without any.
      beat_secs: see `pass_on`.
    """

    def __init__(self, name: str, follow: Callable[..., int], pass_on: Callable[..., Any], beat_secs: float) -> None:
        self._follow, self._pass_on = follow, pass_on
        self.control, self._control = socket.socketpair()
        self._control.settimeout(beat_secs)
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        self._outputs = {1: os.fdopen(to_out, "wb", 0), 2: os.fdopen(to_err, "wb", 0)}
        self._thread = threading.Thread(target=self._run, name=f"tfdist task {name}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._forward, name=f"tfdist signals to {name}", daemon=True).start()

    def wait(self) -> int:
        """Waits until the task has ended. Its exit code was reported before."""
        self._thread.join()
        return 0

    def _run(self) -> None:
        code = self._follow(self._outputs)
        for each in self._outputs.values():
            each.close()
        with contextlib.suppress(OSError):
            self._control.send(f"exit {code}\ndone\n".encode())
            self._control.shutdown(socket.SHUT_RDWR)

    def _forward(self) -> None:
        signums = b"\0"
        with self._control, contextlib.suppress(ConnectionError):
            while signums:
                self._pass_on(signums)
                try:
                    signums = self._control.recv(4096)
                except TimeoutError:
                    signums = b"\0"


class Supervisor:
    """Starts tasks, prints their output, reports their ends in order, and ends all of them.

    Args:
      console: prints the output, each line with the prefix "[name] "; None to print nothing (`Process.tail` has the
        last lines).
      on_lines: called from any thread with a task, lines of its output, and True for standard error.
      shown: names of the tasks whose output is printed; None for all.
      start: starts each task; on this machine by default.
    """

    def __init__(
        self,
        console: Console | None = None,
        on_lines: Callable[[Process, list[str], bool], None] | None = None,
        shown: Collection[str] | None = None,
        start: Start = start_guard,
    ) -> None:
        self._start = start
        self.tracebacks = Tracebacks()
        self._shown = shown
        self._console = console
        self._on_lines = on_lines
        self._owner = os.getpid()
        self._processes: list[Process] = []
        self._exits: queue.SimpleQueue[Process | None] = queue.SimpleQueue()

    @property
    def processes(self) -> tuple[Process, ...]:
        """All tasks that were started, in order."""
        return tuple(self._processes)

    @property
    def running(self) -> tuple[Process, ...]:
        """Tasks that have not ended yet."""
        return tuple(process for process in self._processes if process.returncode is None)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Starts one task.

        Args:
          name: name of the task, such as "worker:1". A task of this name may have been started before.
          command: program and arguments.
          env: the task's whole environment; this process' own by default.

        Raises:
          OSError: the system refuses to start a process.
        """
        restart = sum(process.name == name for process in self._processes)
        is_muted = self._shown is not None and name not in self._shown
        if is_muted:
            self.tracebacks.muted.add(name)
        printer = _Printer(self._console, self._on_lines, TracebackFilter(self.tracebacks, name), env)
        guard = self._start(name, tuple(command), env)
        process = Process(name, guard, printer, self._exits.put, restart, is_muted)
        self._processes.append(process)
        return process

    def wait_first_exit(self, timeout_secs: float | None = None) -> Process | None:
        """Returns the next task that has ended, in the order of their ends, each once; None on timeout or `wake`.

        More of its output may still arrive; `Process.wait` waits for all of it.
        """
        limit = time.monotonic() + (math.inf if timeout_secs is None else timeout_secs)
        while True:
            left = max(0.0, limit - time.monotonic())
            # A signal that another thread has taken, as after a stop, is handled between two waits.
            with contextlib.suppress(queue.Empty):
                return self._exits.get(timeout=min(left, 1.0))
            if not left:
                return None

    def wake(self) -> None:
        """Makes `wait_first_exit` return None. May be called from a signal handler."""
        self._exits.put(None)

    def say(self, lines: Sequence[str]) -> None:
        """Logs lines of the launcher's own."""
        if self._console:
            self._console.say(lines)

    def stop(self, signals: Sequence[int] = (signal.SIGTERM,), grace_secs: float = 3.0) -> bool:
        """Ends all tasks and their descendants. Does nothing when called again, or in a forked copy of this program.

        Args:
          signals: sent one after the other, in equal intervals, until all tasks have ended.
          grace_secs: time until SIGKILL.

        Returns:
          True if all processes have ended. Only a process blocked inside the kernel survives SIGKILL.
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
        return all(process.wait(max(0.0, deadline - time.monotonic())) is not None for process in self._processes)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()


@contextlib.contextmanager
def on_signals(numbers: Iterable[int], note: Callable[[int], object]) -> Iterator[None]:
    """Calls `note` with each of these signals to this process within the block; in the main thread if any are given."""
    before = {number: signal.signal(number, lambda received, _: note(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class _Printer:
    """Passes a task's lines on to the logs, and to the console without noise and with each traceback once."""

    console: Console | None
    on_lines: Callable[[Process, list[str], bool], None] | None
    tracebacks: TracebackFilter
    env: Mapping[str, str] | None

    def show(self, process: Process, lines: list[str], error: bool) -> None:
        """Takes lines of a task's output."""
        if self.on_lines:
            self.on_lines(process, lines, error)
        lines = without_noise(lines, self.env)
        self._write(process, self.tracebacks.feed(lines) if error else lines, error)

    def tick(self, process: Process, is_end: bool = False) -> None:
        """Prints a traceback that is complete, behind the last state of the task's progress bar."""
        lines = self.tracebacks.flush() if is_end else self.tracebacks.due()
        self._write(process, lines, True)

    def _write(self, process: Process, lines: Sequence[str], error: bool) -> None:
        if not lines or not self.console or process.is_muted:
            return
        prefix = f"[{process.name}] "
        if error and TRACEBACK in lines:
            self.console.write(prefix, process.progress())
        self.console.write(prefix, lines, error)
