# SPDX-License-Identifier: Apache-2.0
"""Command line of the commands that read a log directory: one directory, and flags before or after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from absl import flags

from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError


def parse(
    command: str, define: Callable[[flags.FlagValues], None], arguments: Sequence[str]
) -> tuple[flags.FlagValues, str]:
    """Parses the flags and the log directory; "" for --help.

    Raises:
      absl.flags.Error: a flag is unknown or its value can't be parsed.
      LaunchError: there is no directory, or more than one.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    flags.DEFINE_boolean("help", False, "print this help", short_name="h", flag_values=values)
    define(values)
    rest = values([command, *arguments])[1:]
    if values.help:
        return values, ""
    if len(rest) != 1 or not rest[0]:
        received = " ".join(rest) or "no directory"
        raise LaunchError(f"{command} takes one log directory; see {command} --help. Received: {received}")
    return values, rest[0]


def describe(usage: str, values: flags.FlagValues) -> str:
    """Returns the help."""
    return usage + command_line.describe(values)
