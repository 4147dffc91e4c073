# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, each with and without spares, and compares what they left.

Nothing here needs TensorFlow. Each run is given the same delays, by the environment: the draws depend on the worker and
on how many gradients it has computed, not on who trains.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import chart

# What the experiments share.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import training_process

HERE = pathlib.Path(__file__).resolve().parent
STRATEGIES = {"parameter_server": "parameter server", "multi_worker": "multi-worker"}
SETTING = ("num_workers", "spares", "mean_secs", "slowdown", "updates", "batch_size", "learning_rate", "seed")
# Of the logarithm of the delays: an ordinary machine's variation.
_SPREAD = 0.25

Row = dict[str, Any]


def compare(output_dir: pathlib.Path, setting: Mapping[str, Any]) -> int:
    """Trains under both strategies, with `spares` and with none, prints one table and saves the plot.

    Args:
      output_dir: one folder per run is made in it, beside `backup_workers.png` and `summary.json`.
      setting: values of the flags in `SETTING`.

    Returns:
      The exit code: 0 if all reached what `expected.json` asks for.
    """
    summary: dict[str, Row] = {}
    problems: list[str] = []
    for strategy, title in STRATEGIES.items():
        for spares in (0, setting["spares"]):
            name = run_name(strategy, spares)
            print(f"{title}, spares={spares} ...", flush=True)
            rows, problem = _run(strategy, {**setting, "spares": spares}, output_dir / name)
            problems.extend([problem] if problem else [])
            if rows:
                summary[name] = summarize(rows)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + table(summary, setting["spares"]))
    if summary:
        print(f"\nplot  {os.path.relpath(chart.save(output_dir, titles(setting['spares'])))}", flush=True)
    expected = json.loads((HERE / "expected.json").read_text())
    problems += missed(summary, expected, setting["spares"])
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run_name(strategy: str, spares: int) -> str:
    return f"{strategy}-spares-{spares}"


def titles(spares: int) -> dict[str, str]:
    """Returns the title of each run, by its folder."""
    return {run_name(key, b): f"{title}, spares={b}" for key, title in STRATEGIES.items() for b in (0, spares)}


def delays(setting: Mapping[str, Any]) -> str:
    """TFDIST_TEST_DELAYS: the last worker is `slowdown` times as slow as the others."""
    mean = setting["mean_secs"]
    delay = {"distribution": "lognormal", "mean": mean, "s": _SPREAD}
    straggler = {**delay, "mean": mean * setting["slowdown"]}
    return json.dumps({"*": delay, f"worker:{setting['num_workers'] - 1}": straggler, "seed": setting["seed"]})


def command(strategy: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> list[str]:
    """Returns the command that starts a run, with all its processes."""
    flags = [f"--{name}={value}" for name, value in setting.items()]
    script = [str(HERE / "run.py"), f"--strategy={strategy}", f"--output_dir={run_dir}", *flags]
    if strategy == "multi_worker":
        launch = ["-m", "tfdist", "launch", "local", f"--num_workers={setting['num_workers']}"]
        return [sys.executable, *launch, *script]
    return [sys.executable, *script]


def _run(strategy: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> tuple[list[Row], str | None]:
    """One run's rows, and what went wrong, if anything did."""
    environment = {"TFDIST_TEST_DELAYS": delays(setting)}
    problem = training_process.run(run_dir, command(strategy, setting, run_dir), environment=environment)
    path = run_dir / "epochs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [], problem


def summarize(rows: list[Row]) -> Row:
    """Of one run. The first segment builds the graph, which says nothing about the speed of an update."""
    return {
        "seconds": rows[-1]["seconds"],
        "updates": sum(row["updates"] for row in rows),
        "updates_per_sec": statistics.median(row["updates_per_sec"] for row in rows[1:] or rows),
        "loss": rows[-1]["loss"],
        "validation_accuracy": rows[-1]["val_accuracy"],
    }


def table(summary: Mapping[str, Row], spares: int) -> str:
    named = titles(spares)
    width = max(map(len, named.values()))
    lines = [f"{'':{width}}  seconds  updates  updates/s    loss  validation accuracy"]
    for name, row in summary.items():
        lines.append(
            f"{named[name]:{width}}  {row['seconds']:7.1f}  {row['updates']:7d}  {row['updates_per_sec']:9.2f}  "
            f"{row['loss']:6.3f}  {row['validation_accuracy']:19.1%}"
        )
    return "\n".join(lines)


def missed(summary: Mapping[str, Row], expected: Mapping[str, Row], spares: int) -> list[str]:
    """Returns a line for each result that stays below `expected`."""
    problems = []
    for strategy, least in expected.items():
        slow, fast = (summary.get(run_name(strategy, b)) for b in (0, spares))
        if slow is None or fast is None:
            continue
        speedup = fast["updates_per_sec"] / slow["updates_per_sec"]
        if speedup < least["speedup_at_least"]:
            wanted = least["speedup_at_least"]
            problems.append(f"{strategy}: {speedup:.1f} times the updates per second; expected.json wants {wanted}")
        accuracy, wanted = fast["validation_accuracy"], least["validation_accuracy_at_least"]
        if accuracy < wanted:
            problems.append(f"{strategy}: a validation accuracy of {accuracy:.1%}; expected.json wants {wanted:.0%}")
    return problems
