# SPDX-License-Identifier: Apache-2.0
"""Prints the output of tasks as complete lines with a prefix, progress bars included. No TensorFlow import."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import os
import pathlib
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfdist import _log
from tfdist.launchers import environment
from tfdist.launchers.requests import SENT_PREFIX, LaunchError, setting

# Lines that TensorFlow's C++ code writes in every task: at its start, before TF_CPP_MIN_LOG_LEVEL counts, at the end of
# a pass, at SIGTERM, and where functions of tfdist fail in an operation. Other warnings and errors stay, and log files
# have all lines. (303): the machine has no NVIDIA driver.
_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)|I0000 00:00:|To enable the following instructions: [A-Z]"
    r"|E0000 00:00:.*failed call to cuInit: .*\(303\)|W0000 00:00:.*Local rendezvous is aborting with status: ABORTED: "
    r"|[WE]0000 00:00:.*(?:Executor::StartAbort|\] Aborting \w+ with) |\t \[\[\{\{.*tensorflow\.DerivedStatus="
    r"|W0000 00:00:.*\] (?:SIGTERM caught |(?:Local rendezvous is aborting with status: )?(?:UNKNOWN: ConnectionError: "
    r".*(?:never (?:come|end), as|, which ended;)|INVALID_ARGUMENT: ValueError: dataset: every worker must ))"
    r"|The error could be from a previous operation\. Restart your program to reset\."
)


def without_noise(lines: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
    """Returns lines of a task without noise; all of them with TF_CPP_MIN_LOG_LEVEL=0 in the task's environment."""
    name, env = environment.TF_LOG_LEVEL_VARIABLE, env or {}
    is_wanted = "0" in (env.get(name), env.get(SENT_PREFIX + name))
    return [line for line in lines if is_wanted or not _NOISE.match(line)]


# Tracebacks on a job's screen: each is printed whole and once, however many tasks raise it. Log files have all lines.

TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# The name of an exception at the beginning of a line: KeyboardInterrupt, or package.module.Class: message.
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?:: .*)?$")
# Numbers that differ between tasks of the same job: addresses, processes, times, devices, generated names.
_NUMBERS, _ADDRESS = re.compile(r"0x[0-9a-f]+|\d+"), re.compile(r"0x[0-9a-f]+")
# A message is complete when nothing has followed for so long; held lines are printed after `_MOST_SECS` anyway.
_SILENT_SECS, _MOST_SECS, _MOST_LINES = 0.3, 3.0, 1000


class Tracebacks:
    """Exceptions of the tasks of a job.

    Args:
      clock: returns the time in seconds.

    Attributes:
      is_interrupted: True after Ctrl-C, when a KeyboardInterrupt is left out.
      muted: tasks of which no output is printed.
      raised_secs: time of each task's last traceback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.is_interrupted = False
        self.muted: set[str] = set()
        self.raised_secs: dict[str, float] = {}
        self._lock = threading.Lock()
        # By text without numbers, for each task its first lines.
        self._raised_by: dict[str, dict[str, list[str]]] = {}

    def begin(self, task: str) -> None:
        """Notes the beginning of a traceback."""
        with self._lock:
            self.raised_secs = {**self.raised_secs, task: self.clock()}

    def end(self, task: str, lines: list[str]) -> list[str]:
        """Takes a traceback and what has followed; returns the lines to print, without what another task has raised."""
        if self.is_interrupted and _class_of(lines) == "KeyboardInterrupt":
            return []
        if _is_logged_of_tfdist(lines):
            return [line for line in lines[_end_of(lines) :] if line and not line.startswith("\t [[")]
        with self._lock:
            tasks = self._raised_by.setdefault(_NUMBERS.sub("0", "\n".join(lines)), {})
            printed = next((each for name, each in tasks.items() if name not in self.muted), lines)
            is_again = task in tasks
            tasks.setdefault(task, lines)
        if printed is lines or is_again:
            return lines
        # Behind the exception may stand what the program has written meanwhile, such as a loss of this task.
        seen = {_ADDRESS.sub("", line) for line in printed}
        return [line for line in lines[_end_of(lines) :] if _ADDRESS.sub("", line) not in seen]

    def has_raised(self, task: str) -> bool:
        """Returns True if a traceback of this task was printed, or the same one of another task."""
        with self._lock:
            return any(task in tasks for tasks in self._raised_by.values())

    def raised_by_several(self) -> list[tuple[str, list[str]]]:
        """Returns the classes of the exceptions that several tasks have raised, and the names of the tasks."""
        with self._lock:
            several = [(text, list(tasks)) for text, tasks in self._raised_by.items() if len(tasks) > 1]
        return [(_class_of(text.split("\n")) or "exception", tasks) for text, tasks in several]


class TracebackFilter:
    """Holds a traceback in the lines of one task's standard error until its message is complete.

    Args:
      tracebacks: those of the job.
      task: name of the task.
    """

    def __init__(self, tracebacks: Tracebacks, task: str) -> None:
        self._tracebacks, self._task = tracebacks, task
        # The lines that are held, if any; the times of their first and of their last one.
        self.held: list[str] = []
        self._since = self._last = 0.0

    def feed(self, lines: Sequence[str]) -> list[str]:
        """Returns the lines to print now."""
        now, printed = self._tracebacks.clock(), list[str]()
        for line in lines:
            last = next((each for each in reversed(self.held) if each.strip()), "")
            if line == TRACEBACK and not last.startswith(_CHAINED):
                printed += self.flush()
                self._since = now
                self._tracebacks.begin(self._task)
                self.held = [line]
            else:
                (self.held or printed).append(line)
        self._last = now
        return printed + self.flush() if len(self.held) > _MOST_LINES else printed

    def due(self) -> list[str]:
        """Returns the held lines once their message is complete."""
        now = self._tracebacks.clock()
        return self.flush() if now - self._last >= _SILENT_SECS or now - self._since >= _MOST_SECS else []

    def flush(self) -> list[str]:
        """Returns the held lines that are to be printed."""
        held, self.held = self.held, []
        return self._tracebacks.end(self._task, held) if held else []


def _is_logged_of_tfdist(lines: Sequence[str]) -> bool:
    """Returns True for what TensorFlow logs of a function of tfdist in an operation, which Python raises, too."""
    files = [line for line in lines[: _end_of(lines)] if line.startswith('  File "')]
    return lines[1:2] == [""] and bool(files) and f"{os.sep}tfdist{os.sep}" in files[-1]


def _class_of(lines: Sequence[str]) -> str:
    """Returns the class of the last exception of a chain; "" if there is none."""
    match = _EXCEPTION.match(lines[_end_of(lines) - 1]) if lines else None
    return match["name"] if match else ""


def _end_of(lines: Sequence[str]) -> int:
    """Returns the number of lines up to the first one of the last exception's message; all if there is none."""
    found, is_expected = len(lines), False
    for number, line in enumerate(lines, 1):
        if line == TRACEBACK:
            is_expected = True
        elif is_expected and _EXCEPTION.match(line):
            found, is_expected = number, False
    return found


# Log files with the output of each task: DIRECTORY/RUN/attempt_0/worker_1/stdout.log.
#
# A worker that is restarted alone continues in stdout.1.log, then stdout.2.log.

_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)

QUIET_WORKERS = "print the output of the chief (and evaluator) alone, and the last lines of a task that fails"


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Destination of the tasks' output.

    Raises:
      LaunchError: the run's name is invalid, its folder exists, or all output would be lost.
    """

    task_logs: str | None = setting(None, "directory for files with each task's output", str)
    run: str = setting("", "folder in --task_logs; the time by default")
    tee: bool = setting(True, "print the tasks' output, also where it is logged")
    quiet_workers: bool = setting(False, QUIET_WORKERS)

    def __post_init__(self) -> None:
        if self.run and not _RUN.fullmatch(self.run):
            raise LaunchError(f"--run is no name for a folder; use letters, digits, . and -. Received: {self.run!r}")
        if self.run and not self.task_logs:
            raise LaunchError(f"--run is a folder in --task_logs; add --task_logs=DIR. Received: --run={self.run}")
        if self.task_logs is None and not self.tee:
            raise LaunchError("--notee would lose all output; add --task_logs=DIRECTORY. Received: --notee alone")
        if self.task_logs and self.run and pathlib.Path(self.task_logs, self.run).exists():
            raise LaunchError(f"--run is a folder in {self.task_logs}; use another. Received: {self.run!r}")


class TaskLogs:
    """The files of one attempt, each made when its task first prints; several processes may write those of their tasks.

    Args:
      folder: DIRECTORY/RUN.
      attempt: number of the attempt, from 0.
      say: writes a line to the log if a file can't be written; the job continues.
    """

    def __init__(self, folder: pathlib.Path, attempt: int, say: Callable[[str], None]) -> None:
        self.folder = folder / f"attempt_{attempt}"
        self._say = say
        self._refused: set[str] = set()

    def write(self, task: Any, lines: Sequence[str], error: bool) -> None:
        """Appends lines to the log of a `Process`' standard output or standard error."""
        name = ("stderr" if error else "stdout") + (f".{task.restart}" if task.restart else "")
        path = self.folder / task.name.replace(":", "_") / f"{name}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as problem:
            if task.name not in self._refused:
                self._refused.add(task.name)
                self._say(f"can't log what {task.name} prints: {problem}")


_MAX_LINE = 1 << 16
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|\x1b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\x9b]")


class LineReader:
    """Converts the bytes of one stream into the lines that a terminal would finally show, without colours.

    A progress bar rewrites its line with carriage returns (Keras does so even into a pipe). The reader returns the last
    state of such a line, and intermediate states at most every few seconds.

    Args:
      progress_every_secs: least time between two returned states of a line that is being rewritten.
      clock: returns the time in seconds.
    """

    def __init__(self, progress_every_secs: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._progress_every_secs = progress_every_secs
        self._clock = clock
        self._pending = ""
        self._rewritten_since: float | None = None
        self._shown: str | None = None

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Returns the lines completed by `data`."""
        *ended, self._pending = (self._pending + self._decoder.decode(data, final)).split("\n")
        lines = [line for raw in ended for line in self._end_line(raw)]
        if len(self._pending) > _MAX_LINE:
            self._pending = _last_writing(self._pending) + "\r" * self._pending.endswith("\r")
        while len(self._pending) > _MAX_LINE:
            lines.extend(self._end_line(self._pending[:_MAX_LINE]))
            self._pending = self._pending[_MAX_LINE:]
        return lines + self._progress()

    def flush(self) -> list[str]:
        """Returns the present state of a line that is being rewritten, unless it was returned before."""
        line = self._rendered(self._pending)
        if "\r" not in self._pending or not line.strip() or line == self._shown:
            return []
        self._shown = line
        return [line]

    def close(self) -> list[str]:
        """Returns the last line, if it was not terminated."""
        lines = self.feed(b"", final=True)
        last, self._pending = self._pending, ""
        return lines + (self._end_line(last) if last else [])

    def _end_line(self, raw: str) -> list[str]:
        line, shown = self._rendered(raw), self._shown
        self._rewritten_since, self._shown = None, None
        return [] if line == shown else [line]

    def _progress(self) -> list[str]:
        if "\r" not in self._pending:
            return []
        now = self._clock()
        if self._rewritten_since is None:
            self._rewritten_since = now
        if now - self._rewritten_since < self._progress_every_secs:
            return []
        self._rewritten_since = now
        return self.flush()

    def _rendered(self, raw: str) -> str:
        return _CONTROL.sub("", _ESCAPE.sub("", _last_writing(raw)))


def _last_writing(raw: str) -> str:
    """Returns the text after the last carriage return, because programs rewrite the whole line after it."""
    raw = raw.rstrip("\r")
    return raw[raw.rfind("\r") + 1 :]


class Console:
    """Writer of complete lines to this program's standard output and standard error, for any thread.

    Args:
      on_broken_pipe: called once when the output's reader has closed the pipe.
    """

    def __init__(self, on_broken_pipe: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._on_broken_pipe = on_broken_pipe
        self.broken = False

    def write(self, prefix: str, lines: Iterable[str], error: bool = False) -> None:
        """Writes lines with a prefix such as "[worker:1] "."""
        if text := "".join(f"{prefix}{line}\n" for line in lines):
            self._write(text, error)

    def say(self, lines: Iterable[str]) -> None:
        """Logs lines of the launcher's own."""
        _log.say(*lines, write=functools.partial(self._write, wait_secs=1.0))

    def _write(self, text: str, error: bool = True, wait_secs: float = -1.0) -> None:
        # Of the launcher's own lines none is waited for: who reads the tasks' output may have stopped for good.
        if not self._lock.acquire(timeout=wait_secs):
            return
        try:
            _write_fully(sys.stderr if error else sys.stdout, text)
        except BrokenPipeError:
            if not self.broken and self._on_broken_pipe:
                self._on_broken_pipe()
            self.broken = True
        except (OSError, ValueError):
            pass  # The terminal was closed, or the disk is full. Training continues without the output.
        finally:
            self._lock.release()


def _write_fully(stream: Any, text: str) -> None:
    """Writes without the stream's buffer: a thread blocked in the buffer would block the end of the program."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        if stream is not None:  # A replaced stream, as in notebooks and tests.
            stream.write(text)
            stream.flush()
        return
    data = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
