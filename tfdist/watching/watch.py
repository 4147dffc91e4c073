# SPDX-License-Identifier: Apache-2.0
"""`tfdist watch`: the report of the newest run below a log directory in a terminal, live. No TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.launchers.supervise.processes import on_signals
from tfdist.telemetry import report
from tfdist.telemetry.update_log import EventKind, LogReader, Outcome, Timeline, run_directory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_USAGE = """\
usage: tfdist watch LOGDIR [FLAGS]

Shows the run below LOGDIR that began last: its rates, who is slow, and its workers, the slow ones first. It reads the
update logs that tfdist.callbacks.Telemetry(log_dir) writes, and needs no connection to the training. Ctrl-C ends it.
Where the output is no terminal, it prints the state once, as with --once.
"""
# A worker is late if it has sent no gradient for this many times its 95th percentile, and so many seconds.
_LATE_FACTOR, _LATE_SECS = 3.0, 1.0
# A refresh of more gradients would take longer than a second or two.
_MOST_GRADIENTS = 500_000
_MOST_EVENTS = 6
# Columns of what is written into a file or a pipe.
_FILE_WIDTH = 200
# Not listed: they are as many as epochs.
_UNLISTED = (EventKind.VALIDATION, EventKind.CHECKPOINT, EventKind.FINISHED)
# Lines of the screen around the rows of the workers: heads, at most three lines of the table's header, the last line.
_OTHER_LINES = 7
# Columns of the report's table for which a terminal of 80 columns has no room.
_LEFT_OUT = ("worker", "of updates", "of its gradients")


def _run(values: flags.FlagValues, rest: Sequence[str]) -> int:
    if pathlib.Path(rest[0]).exists() and not pathlib.Path(rest[0]).is_dir():
        raise LaunchError(f"tfdist watch takes a log directory, and this is a file. Received: {rest[0]!r}")
    console = _console()
    watched = Watched(rest[0], values.run, values.window_secs)
    if values.once or not console.is_terminal or console.is_dumb_terminal:
        watched.read()
        if watched.job is None:
            raise LaunchError(watched.missing)
        console.print(watched.draw(None))
        return 0
    # An exception, so that the terminal is restored.
    with on_signals((signal.SIGTERM, signal.SIGHUP), lambda signum: sys.exit(128 + signum)):
        _follow(watched, console, values.refresh_secs)
    return 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist watch`."""
    flags.DEFINE_string("run", None, "name of the run, or identifier of the job, to show", flag_values=values)
    flags.DEFINE_float("refresh_secs", 2.0, "time between two looks at the logs", 0.1, 3600.0, flag_values=values)
    flags.DEFINE_float("window_secs", 60.0, "seconds before the last update that are shown", 1.0, flag_values=values)
    flags.DEFINE_boolean("once", False, "print the state once, with all workers, and end", flag_values=values)


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_run, takes="LOGDIR")


def _console() -> Console:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # For terminals without Unicode.
    # Into a file nothing is cut.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(highlight=False, emoji=False, markup=False, width=width)


def _follow(watched: Watched, console: Console, refresh_secs: float) -> None:
    """Draws until KeyboardInterrupt."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            problem = ""
            try:
                watched.read()
            except OSError as error:
                problem = f"{watched.directory}: {error.strerror or error}"
            live.update(watched.draw(console.size.height, problem), refresh=True)
            time.sleep(refresh_secs)


class Watched:
    """The run that is watched.

    Args:
      directory: the log directory.
      run: name of the run, or identifier of the job; None for the run that began last.
      window_secs: seconds before the last update that are shown.

    Attributes:
      job: the newest job of the run; None while there is no log.
    """

    def __init__(self, directory: str, run: str | None, window_secs: float) -> None:
        self.directory = directory
        self.job: Timeline | None = None
        self._run = run
        self._window_secs = window_secs
        self._reader = LogReader(directory)
        self._names: list[str] = []
        self._skipped: list[str] = []

    def read(self) -> None:
        """Reads what is new.

        Raises:
          OSError: the directory can't be listed.
        """
        reading = self._reader.read()
        self._skipped = [f"skipped {each.path}: {each.reason}" for each in reading.skipped]
        jobs = sorted(reading.timelines, key=lambda each: each.origin_secs + each.span[0])
        self._names = list(dict.fromkeys(map(self._name, jobs)))
        chosen = [each for each in jobs if self._run in (None, self._name(each), each.job)]
        self.job = chosen[-1] if chosen else self.job

    def _name(self, job: Timeline) -> str:
        return run_directory(job) or pathlib.Path(self.directory).resolve().name

    @property
    def missing(self) -> str:
        """Message for a log that is missing."""
        where = f"below {self.directory!r}"
        if self._run is None:
            return f"there is no update log {where}; name the log_dir of tfdist.callbacks.Telemetry, or of --telemetry"
        return f"there is no update log of the run {self._run!r} {where}; there are: {', '.join(self._names) or 'none'}"

    def draw(self, height: int | None, problem: str = "") -> RenderableType:
        """Returns the screen of at most `height` lines (None: all workers); `problem` is a line about the directory."""
        from rich.console import Group
        from rich.text import Text

        problems = [Text(plain(each), "yellow") for each in [*filter(None, [problem]), *self._skipped[:2]]]
        if self.job is None:
            hint = "tfdist.callbacks.Telemetry(log_dir) writes one, a few seconds after the first update"
            return Group(Text(plain(f"waiting for an update log below {self.directory}"), "bold"), hint, *problems)
        others = len(set(self._names) - {self._name(self.job)})
        title = Text(plain(self._name(self.job)), "bold")
        title.append(plain(f"  {self.job.header.strategy}  {', '.join(self.job.header.policies)}".rstrip()), "default")
        title.append(f"  (+{others} other run{'s' * (others > 1)}: --run)" if others else "", "dim")
        recent = _window(self.job, self._window_secs)
        found = report.of_log(recent.updates, recent.contributions, recent.workers)
        words = Text(plain(found.in_words), "bold yellow" if found.slow else "bold")
        events = [] if height is not None and height < 2 * _OTHER_LINES else _event_lines(self.job)
        space = None if height is None else max(1, height - _OTHER_LINES - len(events) - len(problems))
        progress = Text(plain(_progress(recent)), "green" if self.job.ended == "finished" else "")
        return Group(title, words, progress, *_table(recent, found, space), *events, *problems)


def _window(job: Timeline, secs: float) -> Timeline:
    """Returns the last seconds before a job's last update, with all events."""
    updates, rows = job.updates, job.contributions
    if len(updates):
        moments = np.maximum.accumulate(updates.time)
        first = min(int(np.searchsorted(moments, moments[-1] - secs)), len(updates) - 1)
        rows = rows[int(updates.offsets[first]) :]
        updates, rows = report.newest(updates[first:], rows, _MOST_GRADIENTS)
    return dataclasses.replace(job, updates=updates, contributions=rows)


def _states(job: Timeline, found: report.Report) -> dict[str, str]:
    """Returns "lost", "late 12 s", "absent" before the first gradient, or "", by worker."""
    updates, rows = job.updates, job.contributions
    last = np.full(len(job.workers), -np.inf)
    arrived = rows.outcome != Outcome.LOST
    np.maximum.at(last, rows.worker[arrived], (np.repeat(updates.time, updates.count) + rows.arrival)[arrived])
    texts = {}
    for worker, name in enumerate(job.workers):
        mine = job.events[job.events.event_worker == worker]
        mine = mine[np.isin(mine.event_kind, (EventKind.LOST, EventKind.RETURNED))]
        is_lost = len(mine) and mine.event_kind[-1] == EventKind.LOST and mine.event_time[-1] >= last[worker]
        step, silent = found.step_secs.get(name), job.span[1] - last[worker]
        usual = max(_LATE_SECS, _LATE_FACTOR * step.p95 if step else 0.0)
        is_late = not job.ended and len(updates) and silent > usual
        absent = "absent" if last[worker] == -np.inf else f"late {duration(silent)}"
        texts[name] = "lost" if is_lost else absent if is_late else ""
    return texts


def _progress(job: Timeline) -> str:
    updates, (begin, end) = job.updates, job.span
    if not len(updates):
        return "no update yet"
    secs, examples = max(end - begin, 1e-9), int(updates.examples.sum())
    rates = [f"{len(updates) / secs:.3g} updates/s"] + ([f"{examples / secs:,.0f} examples/s"] if examples else [])
    waiting = f"waiting for gradients {min(1.0, float(updates.wait.sum()) / secs):.0%} of the last {duration(secs)}"
    ago = duration(max(0.0, time.time() - job.origin_secs - end))
    ended = "simulated" if job.header.simulated else f"{job.ended or 'last update'} {ago} ago"
    warmup = "warmup, " if updates.phase[-1] else ""
    return f"{warmup}step {int(updates.step[-1]):,}, {', '.join(rates)}, {waiting}; {ended}"


def _table(job: Timeline, found: report.Report, most: int | None) -> list[RenderableType]:
    """Returns the report's table of at most so many workers, the slow ones first, and a line about all others."""
    from rich.table import Table
    from rich.text import Text

    # A lost worker is why a run stands still.
    state, (begin, end) = _states(job, found), job.span
    names = sorted(found.order, key=lambda name: state[name] != "lost")
    shown = names if most is None or len(names) <= most else names[: most - 1]
    header, *cells_of = found.worker_rows(shown)
    titles = [each for each in header if each not in _LEFT_OUT]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for title in ("worker", "state", "gradients/s", *titles):
        table.add_column(title, justify="left" if title in ("worker", "state") else "right")
    slow = found.slow.names if found.slow else ()
    for name, row in zip(shown, cells_of, strict=True):
        rate = f"{(found.accepted[name] + found.dropped[name]) / max(end - begin, 1e-9):.3g}"
        style = "bold yellow" if name in slow or state[name] else None
        table.add_row(plain(name), state[name], rate, *(row[header.index(each)] for each in titles), style=style)
    hidden = len(names) - len(shown)
    more = f"{hidden} more worker{'s' * (hidden > 1)}, each of which costs the others less"
    return [table, *([Text(more, "dim")] if hidden else [])]


def _event_lines(job: Timeline) -> list[RenderableType]:
    from rich.text import Text

    events = job.events[~np.isin(job.events.event_kind, _UNLISTED)][-_MOST_EVENTS:]
    lines = []
    for moment, worker, text in zip(events.event_time, events.event_worker, map(str, events.event_text), strict=True):
        clock = time.strftime("%H:%M:%S", time.localtime(job.origin_secs + moment))
        when = f"{moment:8.1f} s" if job.header.simulated else clock
        name = job.workers[worker] if 0 <= worker < len(job.workers) else ""
        words = text if name in text else f"{name} {text}"
        lines.append(Text(f"{when} {plain(words)}", no_wrap=True, overflow="ellipsis"))
    return lines


def plain(text: str) -> str:
    """Returns a text from a file without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def duration(secs: float) -> str:
    """Returns a time such as 12 s, 5 min or 3.1 h."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if secs >= 2 * size:
            return f"{secs / size:.{int(secs < 10 * size)}f} {unit}"
    return f"{secs:.{int(secs < 10)}f} s"
