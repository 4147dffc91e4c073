# SPDX-License-Identifier: Apache-2.0
"""Lines of tfdist to the user, through `logging.getLogger("tfdist")`. No TensorFlow import.

A program that has given this logger, or the root logger, a handler gets the lines there. Otherwise they are written to
standard error behind `PREFIX`. The logger's level and filters hold in both cases.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable

PREFIX = "tfdist: "
_OF_TASK = re.compile(r"tfdist \w+:\d+: ")

_logger = logging.getLogger("tfdist")


def say(*lines: str, write: Callable[[str], object] | None = None) -> None:
    """Logs lines as warnings.

    Args:
      lines: without `PREFIX`.
      write: writes the lines where the program has no handler; to standard error by default.
    """
    if _logger.handlers or (_logger.propagate and not all(map(_is_of_absl, logging.root.handlers))):
        for line in lines:
            _logger.warning("%s", line, stacklevel=2)
    elif _logger.isEnabledFor(logging.WARNING):
        # One write: lines of several processes and threads mix otherwise.
        about = _logger.name, logging.WARNING, __file__, 0, "%s"
        shown = [line for line in lines if _logger.filter(_logger.makeRecord(*about, (line,), None))]
        # Lines of the rendezvous begin with the task instead: "tfdist worker:1: waiting for ...".
        text = "".join(f"{'' if _OF_TASK.match(line) else PREFIX}{line}\n" for line in shown)
        if text:
            (write or _write)(text)


def _write(text: str) -> None:
    """Writes to what is standard error at the time, as a program or a test may replace it, or have closed it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


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
