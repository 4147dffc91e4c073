# SPDX-License-Identifier: Apache-2.0
"""How long the parts without TensorFlow take to answer, a bare interpreter interleaved."""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import tfdist.cluster": [sys.executable, "-c", "import tfdist.cluster"],
    "tfdist launch --help": [sys.executable, "-m", "tfdist.cli", "launch", "--help"],
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each command in each round; the first round fills the caches and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds
