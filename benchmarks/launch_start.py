# SPDX-License-Identifier: Apache-2.0
"""The time from a command to the end of the first training step: a script alone, and as two launched workers.

The script trains under `MultiWorkerMirroredStrategy`, which alone is one device. Both commands run in turn; the first
round fills the caches and does not count. Wall-clock time: a launch is waited for by a person.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

MOST_RATIO = 1.3
_NUM_WORKERS = 2
_LINE = "first step done"
_SCRIPT = f"""
import tfdist
strategy = tfdist.MultiWorkerMirroredStrategy()
import keras
import numpy as np
with strategy.scope():
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(np.zeros([64, 32]), np.zeros([64]), batch_size=32, steps_per_epoch=1, verbose=0)
print({_LINE!r}, flush=True)
"""
_LAUNCH = [sys.executable, "-m", "tfdist", "launch", "local", f"--num_workers={_NUM_WORKERS}"]
# The command of each contender before the script, and how many lines it prints.
_CONTENDERS = {
    "alone": ([sys.executable], 1),
    "launched": ([*_LAUNCH, "--communication=tensorflow"], _NUM_WORKERS),
    "launched, mpi": ([*_LAUNCH, "--communication=mpi"], _NUM_WORKERS),
}


def measure(rounds: int, progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Runs each contender so many times.

    Returns:
      By contender: seconds in each round.
    """
    found: dict[str, list[float]] = {name: [] for name in _CONTENDERS}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_SCRIPT)
        script.flush()
        for number in range(rounds + 1):
            for name, (command, num_lines) in _CONTENDERS.items():
                progress(f"launch_start: {name}, {number} of {rounds}")
                secs = _secs_to_lines([*command, script.name], num_lines)
                found[name] += [secs] if number else []
    return found


def summary(report: dict[str, list[float]]) -> str:
    """Returns a line for each contender."""
    lines = [f"{'start to first step':20}  median s  ratio      quartiles  target"]
    for name, secs in report.items():
        ratios = [ours / alone for ours, alone in zip(secs, report["alone"], strict=True)]
        middle, quartiles = statistics.median(ratios), statistics.quantiles(ratios, n=4, method="inclusive")
        missed = "  MISSED" if middle > MOST_RATIO else ""
        judged = f"<= {MOST_RATIO}{missed}" if name != "alone" else ""
        shown = f"{quartiles[0]:.2f}-{quartiles[2]:.2f}"
        lines.append(f"{name:20}  {statistics.median(secs):8.2f}  {middle:5.2f}  {shown:>13}  {judged}".rstrip())
    return "\n".join(lines)


def _secs_to_lines(command: list[str], count: int) -> float:
    """Returns the seconds until a command has said so often that the first step is done; it is then waited for."""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        output = process.stdout or ()
        while count and (line := next(iter(output), "")):
            count -= _LINE in line
        secs = time.perf_counter() - start
        for _ in output:
            pass
    if count or process.returncode:
        raise RuntimeError(f"{command} ended with code {process.returncode}, {count} lines short")
    return secs
