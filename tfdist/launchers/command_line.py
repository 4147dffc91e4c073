# SPDX-License-Identifier: Apache-2.0
"""Parser of a launcher's own flags, which end where the script and its arguments begin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import flags


def run(
    usage: str,
    define: Callable[[flags.FlagValues], None],
    arguments: Sequence[str],
    launch: Callable[[flags.FlagValues, list[str]], int],
) -> int:
    """Runs a launcher's command: shows its help, or launches the script.

    Args:
      usage: beginning of the help.
      define: defines the flags.
      arguments: arguments after the platform's name.
      launch: launches the script; takes the flags, and the script with its arguments; returns the exit code.

    Returns:
      The exit code.

    Raises:
      LaunchError: the job is invalid, or the platform's tool refuses it.
      absl.flags.Error: a flag is unknown or its value can't be parsed.
    """
    values, command = parse(define, arguments)
    if not values.help:
        return launch(values, command)
    sys.stdout.write(usage + describe(values))
    return 0


def submit_or_show(values: flags.FlagValues, request: object, submit: Callable[[], int]) -> int:
    """Submits a request, or with --dry_run prints it; returns the exit code."""
    if not values.dry_run:
        return submit()
    sys.stdout.write(str(request))
    return 0


def parse(define: Callable[[flags.FlagValues], None], arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Parses the launcher's flags, which end where the script, or "-m MODULE", begins.

    Args:
      define: defines the flags, apart from the program's global flags, which belong to the script.
      arguments: arguments after the platform's name.

    Returns:
      The flags, and the script (or "-m" and a module) with its arguments.

    Raises:
      absl.flags.Error: an unknown flag, or a value that can't be parsed.
    """
    if "-m" in arguments:
        before = list(arguments[: arguments.index("-m")])
        values, script = _parse(define, before)
        # After a script, or "--", this "-m" belongs to the script.
        if not script and "--" not in before:
            return values, list(arguments[len(before) :])
    return _parse(define, arguments)


def _parse(define: Callable[[flags.FlagValues], None], arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    values = flags.FlagValues()
    values.set_gnu_getopt(False)  # By default, absl also parses the arguments after the script's name.
    flags.DEFINE_boolean("help", False, "print this help", short_name="h", flag_values=values)
    define(values)
    return values, values(["tfdist", *arguments])[1:]


def describe(values: flags.FlagValues) -> str:
    """Returns the flags with their defaults and help, one line each."""
    names = [name for name in values if len(name) > 1]
    shown = {name: f"--{name}" if values[name].boolean else f"--{name}={_default(values[name])}" for name in names}
    width = max(map(len, shown.values()))
    return "".join(f"  {shown[name]:{width}}  {help_text(values[name])}\n" for name in names)


def help_text(flag: flags.Flag) -> str:
    """Returns the help of a flag on one line, without absl's sentence about lists."""
    text = " ".join(str(flag.help).split()).removesuffix("; repeat this option to specify a list of values")
    is_said = "may be repeated" in text or "once for each" in text
    return f"{text}; may be repeated" if isinstance(flag, flags.MultiFlag) and not is_said else text


def _default(flag: flags.Flag) -> str:
    return "" if flag.default in (None, []) else flag.default_as_str.strip("'")
