# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, kills tasks in every other one, and compares what they left.

Nothing here needs TensorFlow.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import pathlib
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import chaos_chart
import killing
import step_logs

from tfdist.launchers.supervise import processes

HERE = pathlib.Path(__file__).resolve().parent
STRATEGIES = {"parameter_server": "parameter server", "multi_worker": "multi-worker"}
SHAPES = {"parameter_server": ("--num_workers=2", "--num_ps=1"), "multi_worker": ("--num_workers=2",)}
TRAINING = ("epochs", "batch_size", "learning_rate", "save_freq", "seed")
TROUBLE = ("kill_interval_secs", "least_training_secs", "most_kills", "limit_secs")
# Nobody is given up, however often it is killed, and nobody waits before it is started again.
_RESTARTS = ("--max_restarts=1000", "--max_worker_restarts=1000", "--restart_backoff_secs=0", "--grace_period_secs=1")
_POLL_SECS = 0.1
_LINE_EVERY_SECS = 10.0
# Training is under way if a step was made so long ago at most: more than a step takes, and than a checkpoint does.
_STEP_SECS = 2.0
# For readable logs only; a user's own values stay.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}

Row = dict[str, Any]


def compare(output_dir: pathlib.Path, strategies: Sequence[str], setting: Mapping[str, Any]) -> int:
    """Trains under each strategy, once in peace and once while tasks are killed; prints a table and saves the plot.

    Args:
      output_dir: one folder per run is made in it, beside `chaos.png` and `summary.json`.
      strategies: which.
      setting: values of the flags in `TRAINING` and `TROUBLE`.

    Returns:
      The exit code: 0 if all is as it must be.
    """
    summary: dict[str, dict[str, Row]] = {}
    problems: list[str] = []
    for strategy in strategies:
        summary[strategy] = {}
        for kind in ("calm", "chaos"):
            run_dir = output_dir / f"{strategy}-{kind}"
            summary[strategy][kind] = row = run(strategy, kind, setting, run_dir)
            problems += [f"{STRATEGIES[strategy]}, {kind}: {text}" for text in missed(row, strategy, setting)]
        problems += compared(strategy, **summary[strategy])
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + table(summary))
    print(f"\nplot  {os.path.relpath(chaos_chart.save(output_dir, summary))}", flush=True)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def command(strategy: str, kind: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> list[str]:
    """Returns the command that starts a run, with all its tasks."""
    launch = ["-m", "tfdist", "launch", "local", *SHAPES[strategy], *(_RESTARTS if kind == "chaos" else ())]
    logs = [f"--task_logs={run_dir}", "--run=tasks", "--notee"]
    script = [str(HERE / "enduring.py"), f"--run_dir={run_dir}", *(f"--{name}={setting[name]}" for name in TRAINING)]
    return [sys.executable, *launch, *logs, *script]


def run(strategy: str, kind: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> Row:
    """Trains once; returns what came of it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    name = uuid.uuid4().hex
    own = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    most_kills = 0 if kind == "calm" else setting["most_kills"]
    find = lambda: killing.find_tasks(name)  # noqa: E731
    interval_secs, least_secs = setting["kill_interval_secs"], setting["least_training_secs"]
    killer = killing.Killer(find, interval_secs, setting["seed"], most_kills, least_secs)
    start, code = time.time(), None
    now = next_line = time.monotonic()
    deadline = now + setting["limit_secs"]
    # Whatever ends this program, the supervisor ends the run with all its processes.
    with (run_dir / "launcher.log").open("w", buffering=1, encoding="utf-8") as log:

        def write(process: processes.Process, lines: list[str], error: bool) -> None:
            log.writelines(f"{time.time() - start:7.2f} {line}\n" for line in lines)

        with processes.Supervisor(on_lines=write) as supervisor:
            env = _QUIET | own | {killing.MARK: name}
            launcher = supervisor.start(name, command(strategy, kind, setting, run_dir), env)
            while supervisor.wait_first_exit(_POLL_SECS) is None and now < deadline:
                before, now = now, time.monotonic()
                newest = step_logs.newest(run_dir / "steps")
                killer.advance(now - before, newest is not None and time.time() - newest.secs < _STEP_SECS)
                if now >= next_line:
                    next_line = now + _LINE_EVERY_SECS
                    text = f"{time.time() - start:4.0f} s, {len(killer.kills)} kills, "
                    text += f"step {newest.number}" if newest else "starting"
                    print(f"{STRATEGIES[strategy]}, {kind}: {text}", flush=True)
            code = launcher.returncode
    (run_dir / "kills.json").write_text(json.dumps([[secs - start, task] for secs, task in killer.kills]) + "\n")
    return summarize(strategy, run_dir, code, start, time.time() - start)


def summarize(strategy: str, run_dir: pathlib.Path, code: int | None, start: float, secs: float) -> Row:
    """Returns the results of one run.

    Args:
      strategy: of `STRATEGIES`.
      run_dir: where it wrote.
      code: the launcher's exit code; None if it had to be ended.
      start: when it began, in seconds since 1970.
      secs: how long it took.
    """
    steps = step_logs.read(run_dir / "steps")
    kills = json.loads((run_dir / "kills.json").read_text())
    found = step_logs.account([[step.number for step in made] for made in steps.values()])
    ending_all = [start + when for when, task in kills if strategy == "multi_worker" or "worker" not in task]
    back = step_logs.back_secs(steps, ending_all)
    first = next((made[0].secs for made in steps.values() if made), None)
    intervals = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(kills)]
    result = run_dir / "result.json"
    return {
        "code": code,
        "start": start,
        "first_step_secs": first and first - start,
        "seconds": secs,
        "kills": dict(sorted(collections.Counter(task for _, task in kills).items())),
        "median_interval_secs": statistics.median(intervals) if intervals else None,
        "attempts": len(list((run_dir / "tasks").glob("attempt_*"))),
        "steps": found.last,
        "most_repeated": found.most_repeated,
        "skipped": found.skipped,
        "median_back_secs": statistics.median(back) if back else None,
        "largest_back_secs": max(back, default=None),
        **(json.loads(result.read_text()) if result.exists() else {}),
    }


def missed(row: Row, strategy: str, setting: Mapping[str, Any]) -> list[str]:
    """Returns a line for each problem of one run."""
    if row["code"] is None:
        text = f"did not end within {setting['limit_secs']:g} s; it came to step {row['steps']}"
        if row["kills"] and row["first_step_secs"]:
            text += f", and took {row['first_step_secs']:.0f} s to its first step"
        return [text + "; raise --least_training_secs, --kill_interval_secs or --limit_secs"]
    if row["code"] != 0 or "step" not in row:
        return [f"ended with exit code {row['code']} at step {row['steps']}; see launcher.log and tasks/"]
    problems = []
    if row["skipped"] or row["steps"] != row["step"]:
        problems.append(f"{row['skipped']} steps were skipped; step {row['steps']} of {row['step']} was the last")
    if row["most_repeated"] > setting["save_freq"]:
        problems.append(f"{row['most_repeated']} steps were made again; at most {setting['save_freq']} may be")
    # A parameter server's step whose worker was lost is made by another one, and may have been made already.
    most = sum(count for task, count in row["kills"].items() if "worker" in task) * (strategy == "parameter_server")
    if not 0 <= row["iterations"] - row["step"] <= most:
        text = f"the optimizer counts {row['iterations']} updates of {row['step']} steps"
        problems.append(f"{text}; at most {most} more may be, one for each worker that was killed")
    least = json.loads((HERE / "expected.json").read_text())["validation_accuracy_at_least"]
    if row["validation_accuracy"] < least:
        problems.append(f"a validation accuracy of {row['validation_accuracy']:.2%}; expected.json wants {least:.0%}")
    return problems


def compared(strategy: str, calm: Row, chaos: Row) -> list[str]:
    """Returns a line for each result that the run in chaos lacks beside the calm one."""
    title = STRATEGIES[strategy]
    problems = [] if chaos["kills"] else [f"{title}: nobody was killed; raise --epochs"]
    if "shifted_accuracy" in calm and "shifted_accuracy" in chaos:
        most = json.loads((HERE / "expected.json").read_text())["points_from_calm_at_most"]
        points = 100 * (chaos["shifted_accuracy"] - calm["shifted_accuracy"])
        if abs(points) > most:
            problems.append(f"{title}: {points:+.2f} points from the calm run; expected.json wants at most {most}")
        if strategy == "multi_worker" and calm["weights"] != chaos["weights"]:
            problems.append(f"{title}: the weights are not those of the calm run")
        if calm["step"] != chaos["step"]:
            problems.append(f"{title}: {chaos['step']} steps; the calm run made {calm['step']}")
    return problems


def table(summary: Mapping[str, Mapping[str, Row]]) -> str:
    """One line for each run. "every" and "back" are medians in seconds, between kills and from a kill to a step."""
    head = "strategy          run    seconds  kills  every  attempts  back  steps  repeated  skipped  accuracy  shifted"
    lines = [head + "  killed"]
    for strategy, runs in summary.items():
        for kind, row in runs.items():
            accuracies = [row.get(name) for name in ("validation_accuracy", "shifted_accuracy")]
            accuracy, shifted = ("-" if value is None else f"{value:.2%}" for value in accuracies)
            kills = ", ".join(f"{task} {count}" for task, count in row["kills"].items()) or "-"
            lines.append(
                f"{STRATEGIES[strategy]:16}  {kind:5}  {row['seconds']:7.1f}  {sum(row['kills'].values()):5d}  "
                f"{_secs(row['median_interval_secs']):>5}  {row['attempts']:8d}  {_secs(row['median_back_secs']):>4}  "
                f"{row['steps']:5d}  {row['most_repeated']:8d}  {row['skipped']:7d}  {accuracy:>8}  {shifted:>7}  "
                f"{kills}"
            )
    return "\n".join(lines)


def _secs(secs: float | None) -> str:
    return "-" if secs is None else f"{secs:.1f}"
