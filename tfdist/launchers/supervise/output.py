# SPDX-License-Identifier: Apache-2.0
"""Prints the output of tasks as complete lines with a prefix, progress bars included. No TensorFlow import."""

from __future__ import annotations

import codecs
import dataclasses
import os
import pathlib
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from tfdist import _log
from tfdist.launchers import environment
from tfdist.launchers.requests import SENT_PREFIX, LaunchError

# Filter for the informational lines that TensorFlow's C++ code writes, mostly at a task's start. No TensorFlow import.
#
# TF_CPP_MIN_LOG_LEVEL doesn't suppress all of these lines, because some are written before TensorFlow's logger is set
# up. Warnings, errors and lines about present GPUs stay, and so does Python's own logging, whose lines have a date. All
# lines are shown if TF_CPP_MIN_LOG_LEVEL is 0. Log files of tasks have all lines that a task writes.


# A logger that is not set up writes the date 00/00.
_INFORMATION = re.compile(r"I0000 00:00:\d+\.\d+ +\d+ (?!gpu_|cuda_dnn)\S+\.(?:cc|h):\d+\] ")
_OF_INFORMATION = re.compile(r"To enable the following instructions: |/job:\w+/(?:replica:\d+/)?task:\d+$")
# The line before a printed protocol buffer, and the lines of the buffer; the last one may be empty.
_BUFFER_FOLLOWS = "goo.gle/debug"
_OF_BUFFER = re.compile(r"\s*(?:\w+ \{|\w+: .*|\})?$")
_NO_LOGGER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
# Ordinary messages of a parameter-server job. The rendezvous of a step is cleaned up; the handle of a tensor is deleted
# a second time; functions can't be registered on, or removed from, a lost task. The launcher reports the loss. The
# error of a task can't be reported to one that has ended. When a task fails, all others abort their sums, and each says
# so up to four times before it raises the same.
_HARMLESS = re.compile(
    r"[WE]0000 00:00:\d+\.\d+ +\d+ "
    r"(?:local_rendezvous\.cc:\d+\] Local rendezvous is aborting with status: "
    r"(?:ABORTED: Cleanup |.*Collective ops is aborted)"
    r"|base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort "
    r"|\w+\.cc:\d+\] Aborting (?:Ring|Hier)\w* with "
    r"|preemption_notifier\.cc:\d+\] SIGTERM caught"
    r"|coordination_service(?:_agent)?\.cc:\d+\] Encountered another error (?:while|when) reporting "
    r"|destroy_tensor_handle_node\.h:\d+\] Ignoring an error encountered when deleting remote tensors handles: "
    r"|context\.cc:\d+\] Failed to (?:register|remove) function remotely due to "
    r"(?:failed to connect to all addresses|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:))"
)
_OF_HARMLESS = re.compile(
    r"Additional GRPC error information from remote target |:[A-Z_]+:Error received from peer "
    r"|This could happen if the remote target has been disconnected from the client\.$"
    r"|The error could be from a previous operation\. Restart your program to reset\.|\t \[\[\{\{"
    r"|This is usually caused by an earlier error during execution\. "
)
# 303: this machine has no NVIDIA driver.
_NO_DRIVER = re.compile(r"E0000 00:00:\d+\.\d+ +\d+ cuda_platform\.cc:\d+\] failed call to cuInit: .*\(303\)")


class StartupNoise:
    """Filter for the lines of one stream; it also removes the continuation lines of a removed line.

    Args:
      env: the environment of the task; with TF_CPP_MIN_LOG_LEVEL=0 in it, all lines stay.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        level, visible = (
            env.get(name) or env.get(SENT_PREFIX + name) or ""
            for name in (environment.TF_LOG_LEVEL_VARIABLE, environment.VISIBLE)
        )
        # TensorFlow takes what is no number as 0.
        self._is_wanted = bool(level) and level not in ("1", "2", "3")
        self._has_gpus = bool(visible)
        self._was_information = False
        self._was_harmless = False
        self._is_in_buffer = False

    def without(self, lines: Sequence[str]) -> list[str]:
        """Returns the next lines without startup noise."""
        return [line for line in lines if self._is_wanted or not self._is_noise(line)]

    def _is_noise(self, line: str) -> bool:
        is_first = bool(_INFORMATION.match(line))
        self._is_in_buffer = (
            _BUFFER_FOLLOWS in line if is_first else self._is_in_buffer and bool(_OF_BUFFER.match(line))
        )
        belongs = self._was_information and bool(_OF_INFORMATION.match(line))
        self._was_information = is_first or belongs or self._is_in_buffer
        is_harmless = bool(_HARMLESS.match(line))
        self._was_harmless = is_harmless or (self._was_harmless and bool(_OF_HARMLESS.match(line)))
        is_expected = not self._has_gpus and bool(_NO_DRIVER.match(line))
        return self._was_information or self._was_harmless or line == _NO_LOGGER or is_expected


# Log files with the output of each task: DIRECTORY/RUN/attempt_0/worker_1/stdout.log.
#
# A worker that is restarted alone continues in stdout.1.log, then stdout.2.log.


_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Destination of the tasks' output.

    Args:
      directory: directory for the log files; None for no files.
      run: name of this run: a folder in `directory`.
      tee: whether the output is also printed.
      quiet_workers: whether only the output of the chief and the evaluator is printed.

    Raises:
      LaunchError: the run's name is invalid, or all output would be lost.
    """

    directory: str | None = None
    run: str = ""
    tee: bool = True
    quiet_workers: bool = False

    def __post_init__(self) -> None:
        if self.run and not _RUN.fullmatch(self.run):
            raise LaunchError(
                f"--run is no name for a folder; use letters, digits, dots and dashes. Received: {self.run!r}"
            )
        if self.directory is None and not self.tee:
            raise LaunchError(
                "--notee would lose all output; name a directory with --task_logs. Received: --notee alone"
            )


def new_run_name() -> str:
    """Returns a name that sorts by time, and is unique among the launchers on this machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class TaskLogs:
    """The files of one attempt, each opened when its task first prints.

    Args:
      folder: DIRECTORY/RUN.
      attempt: number of the attempt, from 0.
      say: writes a line to the log if a file can't be written; the job continues.

    Raises:
      OSError: the folder can't be created.
    """

    def __init__(self, folder: pathlib.Path, attempt: int, say: Callable[[str], None]) -> None:
        self.folder = folder / f"attempt_{attempt}"
        self.folder.mkdir(parents=True)
        self._say = say
        self._lock = threading.Lock()
        self._files: dict[tuple[str, bool, int], IO[str] | None] = {}

    def write(self, task: str, lines: Sequence[str], error: bool, restart: int = 0) -> None:
        """Appends lines to the log of a task's standard output or standard error; `restart` counts its restarts."""
        key = task, error, restart
        with self._lock:
            try:
                if key not in self._files:
                    self._files[key] = self._open(*key)
                if file := self._files[key]:
                    file.write("".join(f"{_COLOUR.sub('', line)}\n" for line in lines))
                    file.flush()
            except OSError as problem:
                self._files[key] = None
                self._say(f"can't log what {task} prints: {problem}")

    def close_task(self, task: str) -> None:
        """Closes the files of a task that has ended; the others stay open."""
        with self._lock:
            for key in [key for key in self._files if key[0] == task]:
                if file := self._files.pop(key):
                    file.close()

    def _open(self, task: str, error: bool, restart: int) -> IO[str]:
        name = ("stderr" if error else "stdout") + (f".{restart}" if restart else "")
        path = self.folder / task.replace(":", "_") / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        return path.open("a", encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Closes the files; may be called again."""
        with self._lock:
            for file in self._files.values():
                if file:
                    file.close()
            self._files.clear()


_MAX_LINE = 1 << 16
_COMPACT_AT = 1 << 12
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b]")
_TOKEN = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?P<escape>\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|\x1b)"
    r"|(?P<char>.)",
    re.DOTALL,
)
_RESET = "\x1b[0m"
_PREFIX_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class LineReader:
    """Converts the bytes of one stream into the lines that a terminal would finally show.

    A progress bar rewrites its line with carriage returns or backspaces (Keras does so even into a pipe). The reader
    returns the last state of such a line, and intermediate states at most every few seconds.

    Args:
      keep_colours: True to keep colour codes; all other escape sequences are removed in any case.
      progress_every_secs: least time between two returned states of a line that is being rewritten.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        keep_colours: bool = False,
        progress_every_secs: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._keep_colours = keep_colours
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
            self._pending = _unwritten(self._pending)
        while len(self._pending) > _MAX_LINE:
            lines.extend(self._end_line(self._pending[:_MAX_LINE]))
            self._pending = self._pending[_MAX_LINE:]
        return lines + self._progress()

    def flush(self) -> list[str]:
        """Returns the present state of a line that is being rewritten, unless it was returned before."""
        if "\r" not in self._pending and "\b" not in self._pending:
            return []
        line = self._rendered(self._pending)
        if not line.strip() or line == self._shown:
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
        if "\r" not in self._pending and "\b" not in self._pending:
            return []
        if len(self._pending) > _COMPACT_AT:
            self._pending = _unwritten(self._pending)
        now = self._clock()
        if self._rewritten_since is None:
            self._rewritten_since = now
        if now - self._rewritten_since < self._progress_every_secs:
            return []
        self._rewritten_since = now
        return self.flush()

    def _rendered(self, raw: str) -> str:
        raw = _last_writing(raw.rstrip("\r"))
        if not _CONTROL.search(raw):
            return raw
        cells, _ = _typed(raw, self._keep_colours)
        line = "".join(cells)
        return line + _RESET if "\x1b" in line and not line.endswith(_RESET) else line


def _last_writing(raw: str) -> str:
    """Returns the text after the last carriage return, because programs rewrite the whole line after it."""
    return raw[raw.rfind("\r", 0, len(raw) - 1) + 1 :] if "\r" in raw else raw


def _unwritten(raw: str) -> str:
    """Returns a shorter text with the same effect on the terminal as `raw`, including the position of the cursor."""
    raw = _last_writing(raw)
    if "\b" not in raw:
        return raw
    cells, cursor = _typed(raw.rstrip("\r"), keep_colours=True)
    return "".join(cells) + "\b" * (len(cells) - cursor) + "\r" * raw.endswith("\r")


def _typed(raw: str, keep_colours: bool) -> tuple[list[str], int]:
    """Returns the cells of an empty line after writing `raw`, with their colour codes, and the cursor's position."""
    cells: list[str] = []
    cursor, colours = 0, ""
    for match in _TOKEN.finditer(raw):
        text = match.group()
        if match.lastgroup == "colour":
            colours += text if keep_colours else ""
        elif text == "\b":
            cursor = max(0, cursor - 1)
        elif match.lastgroup == "char" and (text == "\t" or not _CONTROL.match(text)):
            cells[cursor : cursor + 1] = [colours + text]
            cursor, colours = cursor + 1, ""
    if colours and cells:
        cells[-1] += colours
    return cells, cursor


class Console:
    """Writer of complete lines to this program's standard output and standard error, for any thread.

    Args:
      on_broken_pipe: called once when the output's reader has closed the pipe.
    """

    def __init__(self, on_broken_pipe: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._on_broken_pipe = on_broken_pipe
        self.broken = False

    def keeps_colours(self, error: bool) -> bool:
        """Returns True if the stream is a terminal, and the user has not disabled colours (https://no-color.org)."""
        stream = sys.stderr if error else sys.stdout
        return bool(stream and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def write(self, prefix: str, lines: Iterable[str], error: bool = False, number: int | None = None) -> None:
        """Writes lines with a prefix such as "[worker:1] ", on a terminal in the colour of task `number`."""
        if number is not None and self.keeps_colours(error):
            colour = _PREFIX_COLOURS[number % len(_PREFIX_COLOURS)]
            prefix = f"\x1b[{colour}m{prefix}{_RESET}"
        text = "".join(f"{prefix}{line}\n" for line in lines)
        if text:
            self._write(text, error)

    def say(self, lines: Iterable[str]) -> None:
        """Logs lines of the launcher's own."""
        _log.say(*lines, write=self._write)

    def _write(self, text: str, error: bool = True) -> None:
        try:
            with self._lock:
                _write_fully(sys.stderr if error else sys.stdout, text)
        except BrokenPipeError:
            if not self.broken and self._on_broken_pipe:
                self._on_broken_pipe()
            self.broken = True
        except (OSError, ValueError):
            pass  # The terminal was closed, or the disk is full. Training continues without the output.


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
