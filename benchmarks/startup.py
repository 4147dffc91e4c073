# SPDX-License-Identifier: Apache-2.0
"""Measures commands without TensorFlow: until they answer, and launch tasks. A bare interpreter is interleaved."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

NUM_TASKS = 4
# What each takes at most, in seconds; None where it is shown for orientation.
TARGETS: dict[str, float | None] = {
    "python -c pass": None,
    "import tfdist.cluster": 0.5,
    "tfdist launch --help": 0.5,
    # From its start to the first line of the last task, less what one interpreter takes to print that line.
    "launch": 1.0,
}
_TFDIST = [sys.executable, "-m", "tfdist", "launch"]
_COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import tfdist.cluster": [sys.executable, "-c", "import tfdist.cluster"],
    "tfdist launch --help": [*_TFDIST, "--help"],
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each row of `TARGETS` in each round; the first round fills the caches and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS}
    with tempfile.TemporaryDirectory() as directory:
        script = pathlib.Path(directory, "script.py")
        script.write_text("print()\n")
        for number in range(rounds + 1):
            found = {name: _secs(lambda command=command: _run(command)) for name, command in _COMMANDS.items()}
            bare = _secs_to_lines([sys.executable, str(script)], 1)
            launch = [*_TFDIST, "local", f"--num_workers={NUM_TASKS}", str(script)]
            found["launch"] = _secs_to_lines(launch, NUM_TASKS) - bare
            for name, secs in found.items() if number else ():
                seconds[name].append(secs)
    return seconds


def _secs(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _secs_to_lines(command: Sequence[str], count: int) -> float:
    """From the start of a command until it has written so many lines; it is then waited for."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(count)]
        secs = time.perf_counter() - start
    if not all(lines) or process.returncode:
        raise RuntimeError(f"{command} ended with code {process.returncode} after {lines}")
    return secs
