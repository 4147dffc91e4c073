# SPDX-License-Identifier: Apache-2.0
"""Tracebacks on a job's screen: each is printed whole and once, however many tasks raise it. No TensorFlow import.

The lines of a traceback are held until its message is complete, and then printed together, unless

- another task of the job has printed the same one: it is counted;
- it says that a sum over all workers was aborted, because another task has failed: it becomes one line;
- it is a KeyboardInterrupt after Ctrl-C: it is left out.

Log files of tasks have all lines that a task writes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

_FIRST = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# The name of an exception at the beginning of a line: KeyboardInterrupt, or package.module.Class: message.
_EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<message>.*))?$")
# What TensorFlow raises in the tasks that wait for a sum when another one fails.
_ABORTED = re.compile(r"Collective ops is aborted by: (?P<reason>.*)|[Cc]ollective.*(?:abort|cancel)")
# Numbers that differ between tasks of the same job: addresses, processes, times, devices, generated names.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
# A message is complete when nothing has followed for so long; held lines are printed after `_MOST_SECS` anyway.
_SILENT_SECS, _MOST_SECS, _MOST_LINES = 0.3, 3.0, 1000


class Tracebacks:
    """Exceptions of the tasks of a job.

    Args:
      clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # True after Ctrl-C.
        self.is_interrupted = False
        self._lock = threading.Lock()
        self._raised_by: dict[str, list[str]] = {}

    def shown(self, task: str, lines: Sequence[str]) -> list[str]:
        """Returns the lines to print for a task's traceback."""
        header = _header(lines)
        name = header.group("name") if header else ""
        if self.is_interrupted and name == "KeyboardInterrupt":
            return []
        aborted = next((found for line in lines if (found := _ABORTED.search(line))), None)
        if aborted and name.rpartition(".")[2].endswith("Error"):
            reason = aborted.group("reason") or aborted.group()
            return [f"{name.rpartition('.')[2]}: a sum over all workers was aborted: {reason}"]
        with self._lock:
            tasks = self._raised_by.setdefault(_NUMBERS.sub("0", "\n".join(lines)), [])
            is_first = not tasks or task in tasks
            tasks += [] if task in tasks else [task]
        return list(lines) if is_first else []

    def has_raised(self, task: str) -> bool:
        """Returns True if a traceback of this task was printed, or the same one of another task."""
        with self._lock:
            return any(task in tasks for tasks in self._raised_by.values())

    def raised_by_several(self) -> list[tuple[str, list[str]]]:
        """Returns the exceptions that several tasks have raised, as "Class: message", and the names of the tasks."""
        with self._lock:
            several = [(text, list(tasks)) for text, tasks in self._raised_by.items() if len(tasks) > 1]
        found = []
        for text, tasks in several:
            header = _header(text.split("\n"))
            found.append((header.group("name").rpartition(".")[2] if header else "exception", tasks))
        return found


class TracebackFilter:
    """Holds the tracebacks in the lines of one task's standard error.

    Args:
      tracebacks: those of the job.
      task: name of the task.
    """

    def __init__(self, tracebacks: Tracebacks, task: str) -> None:
        self._tracebacks = tracebacks
        self._task = task
        self._held: list[str] = []
        self._since = self._last = 0.0

    @property
    def is_holding(self) -> bool:
        """True while lines are held."""
        return bool(self._held)

    def feed(self, lines: Sequence[str]) -> list[str]:
        """Returns the lines to print now."""
        now, printed = self._tracebacks.clock(), list[str]()
        for line in lines:
            if line == _FIRST and not self._is_chain():
                printed += self.flush()
                self._held, self._since = [line], now
            elif self._held:
                self._held.append(line)
            else:
                printed.append(line)
        self._last = now
        if len(self._held) > _MOST_LINES:
            printed += self.flush()
        return printed

    def due(self) -> list[str]:
        """Returns the held lines once their message is complete."""
        now = self._tracebacks.clock()
        is_complete = bool(self._held) and _header(self._held) is not None and now - self._last >= _SILENT_SECS
        return self.flush() if is_complete or (self._held and now - self._since >= _MOST_SECS) else []

    def flush(self) -> list[str]:
        """Returns the held lines, at the end of the output."""
        held, self._held = self._held, []
        return self._tracebacks.shown(self._task, held) if held else []

    def _is_chain(self) -> bool:
        last = [line for line in self._held if line.strip()][-1:]
        return bool(last) and last[0].startswith(_CHAINED)


def _header(lines: Sequence[str]) -> re.Match[str] | None:
    """Returns the match of the line with the class and the message of the last exception of a chain."""
    found = None
    is_expected = False
    for line in lines:
        if line == _FIRST:
            is_expected = True
        elif is_expected and line and not line[0].isspace() and not line.startswith("^"):
            match = _EXCEPTION.match(line)
            found, is_expected = match or found, match is None
    return found
