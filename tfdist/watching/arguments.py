# SPDX-License-Identifier: Apache-2.0
"""Command line of the commands that read a log directory: one directory, and flags before or after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from absl import flags

from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.telemetry.update_log import Timeline, run_directory

# Runs below a log directory: which jobs belong to a run, and which run a command shows.


def name_of(timeline: Timeline, directory: str) -> str:
    """Returns the name of a job's run: the directory of its logs below `directory`, without that of the writer."""
    path = run_directory(timeline)
    return path or os.path.basename(os.path.abspath(directory)) or directory  # noqa: PTH100, PTH119 - a name


def started(timeline: Timeline) -> float:
    """Returns the Unix time of a job's beginning."""
    return timeline.origin_secs + timeline.span[0]


def chosen(timelines: Sequence[Timeline], directory: str, run: str | None) -> list[Timeline]:
    """Returns the jobs of one run, by their beginning: of the run that began last, if `run` is None.

    A run has several jobs if several trainings, or several parts of a resumed one, wrote to its directory. `run` may
    also be the identifier of a job.
    """
    ordered = sorted(timelines, key=started)
    if run is None:
        run = name_of(ordered[-1], directory) if ordered else ""
    return [each for each in ordered if run in (name_of(each, directory), each.job)]


def parse(
    command: str, define: Callable[[flags.FlagValues], None], arguments: Sequence[str]
) -> tuple[flags.FlagValues, str]:
    """Parses the flags and the log directory; "" for --help.

    Raises:
      FlagError: a flag is unknown or its value can't be parsed.
      LaunchError: there is no directory, or more than one.
    """
    values, rest = command_line.parse(define, arguments, is_anywhere=True)
    if values.help:
        return values, ""
    if len(rest) != 1 or not rest[0]:
        received = " ".join(rest) or "no directory"
        raise LaunchError(f"{command} takes one log directory; see {command} --help. Received: {received}")
    return values, rest[0]


def describe(usage: str, values: flags.FlagValues) -> str:
    """Returns the help."""
    return usage + command_line.describe(values)
