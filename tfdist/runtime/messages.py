# SPDX-License-Identifier: Apache-2.0
"""Lines that tfdist writes to the terminal. No TensorFlow import."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Writes a line to standard error."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
