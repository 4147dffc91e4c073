# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, and compares what they left with what the paper leads to expect.

Nothing here needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import softsync_chart

# What the experiments share.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import training_process

HERE = pathlib.Path(__file__).resolve().parent
SETTING = ("num_workers", "minibatch", "learning_rate", "epochs", "gradients_per_epoch", "mean_secs", "seed")
RULES = ("fixed", "inverse")
# Of the logarithm of the delays: an ordinary machine's variation.
_SPREAD = 0.25
_LIMIT_SECS = 900.0

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: n-softsync and what its gradients are weighted by; n=0 is synchronous training."""

    n: int
    rule: str = ""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"n-{self.n}-{self.rule}" if self.n else "synchronous"

    @property
    def title(self) -> str:
        return f"n={self.n}, {self.rule}" if self.n else self.name


def runs(ns: Sequence[int]) -> list[Run]:
    """All runs of these n, the synchronous one first."""
    return [Run(0), *(Run(n, rule) for n in ns for rule in RULES)]


def find(name: str, ns: Sequence[int]) -> Run | None:
    return next((run for run in runs(ns) if run.name == name), None)


def compare(output_dir: pathlib.Path, ns: Sequence[int], setting: Mapping[str, Any]) -> int:
    """Trains all runs, prints one table and saves the plot.

    Args:
      output_dir: one folder per run is made in it, beside `staleness.png` and `summary.json`.
      ns: which n-softsync.
      setting: values of the flags in `SETTING`.

    Returns:
      The exit code: 0 if all is as `expected.json` wants it.
    """
    summary: dict[str, Row] = {}
    problems: list[str] = []
    print(_HEAD, flush=True)
    for run in runs(ns):
        problem = train(run, ns, setting, output_dir / run.name)
        if problem:
            problems.append(problem)
            continue
        summary[run.name] = summarize(run, output_dir / run.name)
        print(line(run, summary[run.name]), flush=True)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if summary:
        print(f"\nplot  {os.path.relpath(softsync_chart.save(output_dir, runs(ns)))}", flush=True)
    problems += missed(summary, ns, json.loads((HERE / "expected.json").read_text()))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def delays(setting: Mapping[str, Any]) -> str:
    """TFDIST_TEST_DELAYS: all workers are equally slow, so that they take turns on however few cores."""
    return json.dumps(
        {"*": {"distribution": "lognormal", "mean": setting["mean_secs"], "s": _SPREAD}, "seed": setting["seed"]}
    )


def train(run: Run, ns: Sequence[int], setting: Mapping[str, Any], run_dir: pathlib.Path) -> str | None:
    """Trains once; returns what went wrong, if anything did."""
    flags = [f"--{name}={value}" for name, value in setting.items()] + [f"--n={n}" for n in ns]
    command = [sys.executable, str(HERE / "run.py"), f"--run={run.name}", f"--output_dir={run_dir}", *flags]
    return training_process.run(run_dir, command, _LIMIT_SECS, {"TFDIST_TEST_DELAYS": delays(setting)})


def summarize(run: Run, run_dir: pathlib.Path) -> Row:
    """Returns the results of one run."""
    rows = [json.loads(text) for text in (run_dir / "epochs.jsonl").read_text().splitlines()]
    staleness = {int(key): count for key, count in read_report(run_dir)["staleness"].items()}
    gradients = sum(staleness.values())
    return {
        "seconds": rows[-1]["seconds"],
        "updates": sum(row["updates"] for row in rows),
        "mean_staleness": sum(key * count for key, count in staleness.items()) / gradients,
        "largest_staleness": max(staleness),
        # Those of the paper's remark that staleness is hardly ever beyond 2n.
        "share_beyond_2n": sum(count for key, count in staleness.items() if key > 2 * run.n) / gradients,
        "loss": rows[-1]["val_loss"],
        "validation_accuracy": rows[-1]["val_accuracy"],
    }


def read_report(run_dir: pathlib.Path) -> Row:
    return json.loads((run_dir / "report.json").read_text())


_HEAD = "n  rule         updates  seconds  mean staleness  largest  beyond 2n  validation loss  validation accuracy"


def line(run: Run, row: Row) -> str:
    """A run's line of the table."""
    return (
        f"{run.n or '-'}  {run.rule or run.name:11}  {row['updates']:7d}  {row['seconds']:7.1f}  "
        f"{row['mean_staleness']:14.2f}  {row['largest_staleness']:7d}  {row['share_beyond_2n']:9.2%}  "
        f"{row['loss']:15.4g}  {row['validation_accuracy']:19.2%}"
    )


def missed(summary: Mapping[str, Row], ns: Sequence[int], expected: Mapping[str, Any]) -> list[str]:
    """Returns a line for each result that is not as `expected` wants it."""
    problems = []
    tolerance = expected["mean_staleness_over_n_within"]
    synchronous = summary.get(Run(0).name)
    for run in runs(ns)[1:]:
        row = summary.get(run.name)
        if row is None:
            continue
        ratio = row["mean_staleness"] / run.n
        if not tolerance[0] <= ratio <= tolerance[1]:
            mean = row["mean_staleness"]
            problems.append(f"{run.name}: a mean staleness of {mean:.2f}; expected.json wants n times {tolerance}")
        if synchronous is None:
            continue
        behind = synchronous["validation_accuracy"] - row["validation_accuracy"]
        most = expected["inverse_behind_synchronous_at_most"]
        # A loss that is not a number has an accuracy all the same.
        if run.rule == "inverse" and not (behind <= most and math.isfinite(row["loss"])):
            problems.append(f"{run.name}: {behind:.1%} less accurate than synchronous; expected.json wants {most:.1%}")
        diverges = run.rule == "fixed" and run.n in expected["fixed_diverges_for_n"]
        if diverges and behind < expected["diverged_behind_synchronous_at_least"]:
            problems.append(f"{run.name}: only {behind:.1%} less accurate than synchronous; it should diverge")
    return problems
