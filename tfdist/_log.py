# SPDX-License-Identifier: Apache-2.0
"""Lines that tfdist tells the user, through `logging.getLogger("tfdist")`. No TensorFlow import.

A program that has given this logger, or the root logger, a handler gets the lines there. Otherwise they are written to
standard error behind "tfdist: ". The logger's level and filters hold in both cases.
"""

from __future__ import annotations

import logging
import sys

PREFIX = "tfdist: "

_logger = logging.getLogger("tfdist")


class _Terminal(logging.Handler):
    """Writes to what is standard error at the time, as a program or a test may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # One write: lines of several processes and threads mix otherwise.
            line = record.getMessage()
            # Lines of the rendezvous begin with the task instead: "tfdist worker:1: waiting for ...".
            sys.stderr.write(f"{line}\n" if line.startswith("tfdist ") else f"{PREFIX}{line}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


_terminal = _Terminal()


def say(line: str) -> None:
    """Logs a line as a warning; `PREFIX` in front of it is left out, as the handler writes it."""
    line = line.removeprefix(PREFIX)
    if _logger.handlers or (_logger.propagate and _has_own_handler(logging.root)):
        _logger.warning("%s", line, stacklevel=2)
    elif _logger.isEnabledFor(logging.WARNING):
        record = _logger.makeRecord(_logger.name, logging.WARNING, __file__, 0, "%s", (line,), None)
        if _logger.filter(record):
            _terminal.handle(record)


def _has_own_handler(logger: logging.Logger) -> bool:
    return not all(_is_of_absl(handler) for handler in logger.handlers)


def _is_of_absl(handler: logging.Handler) -> bool:
    # `absl.app.run` gives the root logger a handler that the program did not ask for, and so does the first line that
    # TensorFlow logs by absl: that of a `logging.basicConfig()` without arguments.
    return type(handler).__module__.startswith("absl.") or (
        type(handler) is logging.StreamHandler
        and getattr(handler.formatter, "_fmt", None) == logging.BASIC_FORMAT
        and handler.stream is not sys.stdout
        # Not `sys.stderr` itself, which may have been replaced since; of a reopened descriptor the name is its number.
        and str(getattr(handler.stream, "name", "")).startswith(("<", "2"))
    )
