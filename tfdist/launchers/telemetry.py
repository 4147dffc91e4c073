# SPDX-License-Identifier: Apache-2.0
"""The flag `--telemetry[=DIR]`: all tasks write telemetry, without a change of the script."""

from __future__ import annotations

import time

from absl import flags

# Read by every strategy: `fit` gets `tfdist.callbacks.Telemetry` with this directory, unless it has one.
VARIABLE = "TFDIST_TELEMETRY"


def define_flag(values: flags.FlagValues) -> None:
    """Defines the flag, which may be given with a directory or without one."""
    text = "directory for tfdist.callbacks.Telemetry of every fit; without a value, logs/ and the time"
    # absl lets flags of this kind go without a value, and with one it may be any text.
    flags.DEFINE_flag(
        flags.Flag(_Directory(), flags.ArgumentSerializer(), "telemetry", None, text, boolean=True), values
    )


def environment(directory: str | None) -> dict[str, str]:
    """Returns the variables that the flag's value adds to the tasks' environment."""
    return {VARIABLE: directory} if directory else {}


class _Directory(flags.ArgumentParser):
    syntactic_help = "a directory, or nothing"

    def parse(self, argument: str) -> str | None:
        """Returns the directory. absl says "true" for a flag without a value, and "false" for --notelemetry."""
        if argument == "true":
            return time.strftime("logs/%Y%m%d-%H%M%S")
        return None if argument == "false" else argument
