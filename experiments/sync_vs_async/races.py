# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, and says who wins. Nothing here needs TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import races_chart

# What the experiments share.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import training_process

HERE = pathlib.Path(__file__).resolve().parent
METHODS = {
    "synchronous": "synchronous",
    "backup_workers": "1 spare",
    "soft_sync": "soft-sync",
    "bounded": "bounded",
    "asynchronous": "asynchronous",
    "averaged": "averaged",
}
SPEEDS = ("even", "uneven")
SETTING = ("secs", "minibatch", "learning_rate", "mean_secs", "slowdown", "bound", "every_steps", "seed")
# Of the logarithm of the delays: an ordinary machine's variation.
_SPREAD = 0.25
_LIMIT_SECS = 300.0

Points = list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Race:
    """Conditions of a race: the number of workers, and their speeds."""

    num_workers: int
    speeds: str

    @property
    def name(self) -> str:
        """The first part of its folders' names."""
        return f"{self.num_workers}-{self.speeds}"

    def methods(self, chosen: Iterable[str]) -> list[str]:
        """Returns the methods of `chosen` that differ with so many workers."""
        without = {1: set(METHODS) - {"synchronous"}, 2: {"soft_sync"}}.get(self.num_workers, set())
        return [method for method in chosen if method not in without]


def races(nums_workers: Iterable[int], speeds: Iterable[str]) -> list[Race]:
    """All races; one worker alone can't be uneven."""
    speeds = list(speeds)
    return [Race(count, speed) for speed in speeds for count in nums_workers if count > 1 or speed == speeds[0]]


def compare(output_dir: pathlib.Path, todo: Sequence[Race], methods: Sequence[str], setting: Mapping[str, Any]) -> int:
    """Runs all methods in all races, prints one table and saves the plots.

    Args:
      output_dir: one folder per run is made in it, beside the plots, `table.txt` and `summary.json`.
      todo: the races.
      methods: keys of `METHODS`.
      setting: values of the flags in `SETTING`.

    Returns:
      The exit code: 0 if all runs ended well.
    """
    results: dict[Race, dict[str, Points]] = {}
    problems: list[str] = []
    lines = head(methods)
    print("\n".join(lines), flush=True)
    for race in todo:
        results[race] = {}
        for method in race.methods(methods):
            run_dir = output_dir / f"{race.name}-{method}"
            problem = _train(race, method, setting, run_dir)
            if problem:
                problems.append(problem)
            else:
                results[race][method] = read(run_dir)
        if results[race]:
            lines.append(row(race, results[race], methods))
            print(lines[-1], flush=True)
    (output_dir / "table.txt").write_text("\n".join(lines) + "\n")
    summary = {race.name: {"winners": winners(points), "points": points} for race, points in results.items() if points}
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for path in races_chart.save(output_dir, {race: points for race, points in results.items() if points}, METHODS):
        print(f"plot  {os.path.relpath(path)}", flush=True)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def delays(race: Race, setting: Mapping[str, Any]) -> str:
    """As `tfdist.testing.Delays.to_json` writes them: where they are uneven, the last worker is slower."""
    delay = {"distribution": "lognormal", "mean": setting["mean_secs"], "s": _SPREAD}
    by_worker: dict[str, Any] = {"*": delay, "seed": setting["seed"]}
    if race.speeds == "uneven":
        by_worker[f"worker:{race.num_workers - 1}"] = delay | {"mean": setting["mean_secs"] * setting["slowdown"]}
    return json.dumps(by_worker)


def command(race: Race, method: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> list[str]:
    """Returns the command that starts a run, with all its processes."""
    flags = [f"--{name}={value}" for name, value in setting.items()]
    flags += [f"--num_workers={race.num_workers}", f"--speeds={race.speeds}"]
    script = [str(HERE / "run.py"), f"--run={method}", f"--output_dir={run_dir}", *flags]
    if method == "averaged":
        launch = ["-m", "tfdist", "launch", "local", f"--num_workers={race.num_workers}"]
        return [sys.executable, *launch, *script]
    return [sys.executable, *script]


def _train(race: Race, method: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> str | None:
    """Trains once; returns what went wrong, if anything did."""
    environment = {"TFDIST_TEST_DELAYS": delays(race, setting)} if method != "averaged" else {}
    return training_process.run(run_dir, command(race, method, setting, run_dir), _LIMIT_SECS, environment)


def read(run_dir: pathlib.Path) -> Points:
    """The points of a run's curve."""
    return [json.loads(text) for text in (run_dir / "points.jsonl").read_text().splitlines()]


def loss_at(points: Points, by: str, where: float) -> float:
    """The loss at so many seconds or examples: that of the last point until then."""
    before = [point for point in points if point[by] <= where]
    return (before or points)[-1 if before else 0]["val_loss"]


def winners(results: Mapping[str, Points]) -> dict[str, Any]:
    """Returns the method with the least loss after the same time, and after the same number of examples.

    Returns:
      By "seconds" and "examples": where they are compared, which is as far as the shortest run came; "losses" by
      method; "winner".
    """
    found = {}
    for by in ("seconds", "examples"):
        where = min(points[-1][by] for points in results.values())
        losses = {method: loss_at(points, by, where) for method, points in results.items()}
        found[by] = {"where": where, "losses": losses, "winner": min(losses, key=lambda method: losses[method])}
    return found


def head(methods: Sequence[str]) -> list[str]:
    columns = "".join(f"{METHODS[method]:>14}" for method in methods)
    return [
        "validation loss after the same time, in brackets examples per second",
        f"{'workers':>7}  {'speeds':6}{columns}  {'best by seconds':15}  best by examples",
    ]


def row(race: Race, results: Mapping[str, Points], methods: Sequence[str]) -> str:
    """A race's line of the table."""
    found = winners(results)
    cells = []
    for method in methods:
        points = results.get(method)
        speed = (points[-1]["examples"] - points[0]["examples"]) / points[-1]["seconds"] if points else 0
        cells.append(f"{found['seconds']['losses'][method]:.3f} ({speed:.0f})" if points else "-")
    best = [METHODS[found[by]["winner"]] if len(results) > 1 else "-" for by in ("seconds", "examples")]
    columns = "".join(f"{cell:>14}" for cell in cells)
    after = f"{best[1]}, after {found['examples']['where']:.0f}" if len(results) > 1 else best[1]
    return f"{race.num_workers:7d}  {race.speeds:6}{columns}  {best[0]:15}  {after}"
