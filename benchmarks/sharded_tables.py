# SPDX-License-Identifier: Apache-2.0
"""Steps of tables of 10,000 and of 10 million rows, in shards on two parameter servers: the same rows are looked up.

`measure` starts this file as the program of each table, with its own cluster, and has them train in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROWS = (10_000, 10_000_000)
WIDTH, IDS, BATCH, STEPS = 16, 8, 64, 60
# Largest difference between the tables in traffic and in steps per second.
MOST_DIFFERENCE = 0.05


def measure(rounds: int, progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Trains both tables in turn.

    Returns:
      By number of rows: "steps_per_sec" and "bytes_per_step" (of all tasks) of each round, "table_mb" with the
      optimizer's slots, and "memory_mb" of each task at the end.
    """
    found: dict[str, dict[str, Any]] = {}
    programs = {rows: _start(rows) for rows in ROWS}
    try:
        for number in range(rounds):
            for rows, program in programs.items():
                progress(f"sharded_tables: {rows:,} rows, {number + 1} of {rounds}")
                figures = _ask(program)
                entry = found.setdefault(str(rows), {"steps_per_sec": [], "bytes_per_step": []})
                for name in ("steps_per_sec", "bytes_per_step"):
                    entry[name].append(figures[name])
                entry |= {"table_mb": 3 * rows * WIDTH * 4 / 1e6, "memory_mb": figures["memory_mb"]}
    finally:
        for program in programs.values():
            program.stdin.close()  # type: ignore[union-attr]
            program.wait(60)
    return found


def summary(report: dict[str, dict[str, Any]]) -> str:
    """Returns a line for each table, and the ratios of the larger one."""
    lines = [f"{'rows':>12}  steps/s  bytes/step  table MB  memory of the tasks, MB"]
    for rows, found in report.items():
        medians = [statistics.median(found[name]) for name in ("steps_per_sec", "bytes_per_step")]
        memory = ", ".join(f"{task}: {size:.0f}" for task, size in found["memory_mb"].items())
        lines.append(f"{int(rows):12,}  {medians[0]:7.1f}  {medians[1]:10,.0f}  {found['table_mb']:8.0f}  {memory}")
    small, large = report.values()
    for name in ("steps_per_sec", "bytes_per_step"):
        ratios = [a / b for a, b in zip(large[name], small[name], strict=True)]
        middle = statistics.median(ratios)
        missed = "  MISSED" if abs(middle - 1) > MOST_DIFFERENCE else ""
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        lines.append(f"{name}: {middle:.3f} ({low:.3f}-{high:.3f}) of the small table's; within 5 %{missed}")
    return "\n".join(lines)


def _start(rows: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
    command = [sys.executable, __file__, str(rows)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    _line(program)
    return program


def _ask(program: subprocess.Popen[str]) -> dict[str, Any]:
    program.stdin.write("train\n")  # type: ignore[union-attr]
    program.stdin.flush()  # type: ignore[union-attr]
    return json.loads(_line(program))


def _line(program: subprocess.Popen[str]) -> str:
    line = program.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"the program {program.args!r} has ended with exit code {program.wait()}")
    return line


def _serve(rows: int) -> None:
    import keras
    import numpy as np

    import tfdist

    generator = np.random.default_rng(0)
    ids = generator.integers(0, rows, size=(BATCH * STEPS, IDS))
    targets = generator.normal(size=(BATCH * STEPS, 1)).astype("float32")
    strategy = tfdist.ParameterServerStrategy(
        num_workers=1,
        num_ps=2,
        variable_partitioner=tfdist.ShardedTables(min_bytes=1024),
        policies=[tfdist.LazyRows()],
    )
    with strategy.scope():
        layers = [keras.layers.Embedding(rows, WIDTH), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((IDS,), dtype="int64"), *layers])
        model.compile("adam", "mse")
    model.fit(ids, targets, batch_size=BATCH, verbose=0)
    print("ready", flush=True)
    for _ in sys.stdin:
        before, start = sum(strategy.report().bytes_sent.values()), time.perf_counter()
        model.fit(ids, targets, batch_size=BATCH, verbose=0)
        secs, report = time.perf_counter() - start, strategy.report()
        figures = {
            "steps_per_sec": STEPS / secs,
            "bytes_per_step": (sum(report.bytes_sent.values()) - before) / STEPS,
            "memory_mb": {task: size / 1e6 for task, size in report.memory_bytes.items()},
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
