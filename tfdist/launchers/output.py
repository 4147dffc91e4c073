# SPDX-License-Identifier: Apache-2.0
"""Prints the output of tasks as complete lines with a prefix, progress bars included. No TensorFlow import."""

from __future__ import annotations

import codecs
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

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
            with self._lock:
                self._write_now(sys.stderr if error else sys.stdout, text)

    def _write_now(self, stream: Any, text: str) -> None:
        try:
            _write_fully(stream, text)
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
