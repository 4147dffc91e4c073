# SPDX-License-Identifier: Apache-2.0
"""`tfdist watch`: the newest run below a log directory in a terminal, live. No TensorFlow."""

from __future__ import annotations

import contextlib
import io
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from tfdist import _log
from tfdist.launchers.requests import LaunchError, ToolError
from tfdist.telemetry.scalar_files import SENT, ScalarFiles, task_of
from tfdist.telemetry.update_log import LocalFiles, LogReader, Reading, run_directory
from tfdist.watching import arguments, snapshot
from tfdist.watching import arguments as command_arguments

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COMMAND = "tfdist watch"
_USAGE = """\
usage: tfdist watch LOGDIR [FLAGS]

Shows the run below LOGDIR that began last: the updates, and the workers by what they cost the others. It reads the
update logs that tfdist.callbacks.Telemetry(log_dir) writes, and needs no connection to the training. Ctrl-C ends it.
Where the output is no terminal, it prints the state once, as with --once.

flags:
"""
# Interval of looks at the size of the terminal.
_RESIZE_SECS = 0.25


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist watch`.

    Returns:
      0; 1 with --once if there is no update log yet; 130 after Ctrl-C.

    Raises:
      absl.flags.Error: a flag is unknown or its value can't be parsed.
      LaunchError: the command line makes no sense, or the library rich is missing.
      OSError: the directory can't be read.
    """
    values, directory = command_arguments.parse(_COMMAND, define_flags, arguments)
    if not directory:
        sys.stdout.write(command_arguments.describe(_USAGE, values))
        return 0
    if pathlib.Path(directory).exists() and not pathlib.Path(directory).is_dir():
        raise LaunchError(f"{_COMMAND} takes a log directory, and this is a file. Received: {directory!r}")
    console = _console()
    watched = _Watched(directory, values.run, values.window_secs)
    if values.once or not console.is_terminal or console.is_dumb_terminal:
        return _once(watched, console)
    with _terminated_by_exception(), contextlib.suppress(BrokenPipeError):
        _follow(watched, console, values.refresh_secs)
    return 0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist watch`."""
    flags.DEFINE_string("run", None, "name of the run, or identifier of the job, to show", flag_values=values)
    flags.DEFINE_float("refresh_secs", 2.0, "time between two looks at the logs", 0.1, 3600.0, flag_values=values)
    window_help = "seconds before the last update that rates, percentiles, staleness, cost and bars cover"
    flags.DEFINE_float("window_secs", 60.0, window_help, 1.0, flag_values=values)
    flags.DEFINE_boolean("once", False, "print the state once, with all workers, and end", flag_values=values)


def _console() -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise ToolError(
            f"{_COMMAND} draws with the library rich, which is missing; pip install rich. Received: no module rich"
        ) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # For terminals without Unicode.
    return Console(highlight=False, emoji=False, markup=False)


class _Watched:
    """The run that is watched.

    Args:
      directory: the log directory.
      run: name of the run, or identifier of the job; None for the run that began last.
      window_secs: how far back the numbers go.
    """

    def __init__(self, directory: str, run: str | None, window_secs: float) -> None:
        self.directory = directory
        self._run = run
        self._window_secs = window_secs
        self._reader = LogReader(directory)
        self._reading = Reading((), ())
        self._name = ""
        self._snapshot: snapshot.Snapshot | None = None
        self._path = ""
        self._scalars: ScalarFiles | None = None

    def read(self) -> None:
        """Reads what is new.

        Raises:
          OSError: the directory can't be listed.
        """
        self._reading = self._reader.read()
        if not self._reading.is_new:
            return
        jobs = arguments.chosen(self._reading.timelines, self.directory, self._run)
        if jobs:
            self._name = arguments.name_of(jobs[-1], self.directory)
            self._snapshot = snapshot.take(jobs[-1], self._window_secs)
            path = str(pathlib.Path(self.directory, run_directory(jobs[-1])))
            if path != self._path:
                self._path, self._scalars = path, ScalarFiles(path, LocalFiles(), frozenset((SENT,)))

    @property
    def is_found(self) -> bool:
        """True once the run has a log."""
        return self._snapshot is not None

    @property
    def names(self) -> list[str]:
        """Names of all runs, each once."""
        return list(dict.fromkeys(arguments.name_of(each, self.directory) for each in self._reading.timelines))

    @property
    def missing(self) -> str:
        """Message for a log that is missing."""
        where = f"below {self.directory!r}"
        if self._run is None:
            return f"there is no update log {where}"
        return f"there is no update log of the run {self._run!r} {where}; there are: {', '.join(self.names) or 'none'}"

    def _sent(self) -> dict[str, float]:
        """Returns the bytes that each task sends per second, where Telemetry has written them."""
        found = self._scalars.read() if self._scalars else {}
        return {
            task: tags[SENT][-1].value for folder, tags in found.items() if SENT in tags and (task := task_of(folder))
        }

    def draw(self, console: Console, height: int | None, now: float, problems: Sequence[str] = ()) -> RenderableType:
        """Returns the screen."""
        from tfdist.watching import screen

        skipped = [f"{screen.plain(each.path)}: {screen.plain(each.reason)}" for each in self._reading.skipped]
        view = screen.View(
            width=console.width,
            height=height,
            now=now,
            run=self._name,
            other_runs=len(set(self.names) - {self._name}),
            is_unicode=console.encoding.lower().startswith("utf"),
            bytes_sent=self._sent(),
            problems=(*problems, *skipped),
        )
        if self._snapshot is None:
            what = self.directory if self._run is None else f"{self.directory}, of the run {self._run}"
            return screen.waiting(what, view)
        return screen.draw(self._snapshot, view)


def _once(watched: _Watched, console: Console) -> int:
    watched.read()
    if not watched.is_found:
        _log.say(watched.missing)
        return 1
    console.print(watched.draw(console, None, time.time()))
    return 0


def _follow(watched: _Watched, console: Console, refresh_secs: float) -> None:
    """Draws until KeyboardInterrupt."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            problems = []
            try:
                watched.read()
            except OSError as error:
                problems = [f"{watched.directory}: {error.strerror or error}"]
            deadline, size = time.monotonic() + refresh_secs, None
            while (left := deadline - time.monotonic()) > 0:
                if console.size != size:
                    size = console.size
                    live.update(watched.draw(console, size.height, time.time(), problems), refresh=True)
                time.sleep(min(left, _RESIZE_SECS))


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exception, so that the terminal is restored."""

    def end(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    before: dict[int, Callable[..., Any] | int | None] = {}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        before[signum] = signal.signal(signum, end)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
