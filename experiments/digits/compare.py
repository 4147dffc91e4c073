# SPDX-License-Identifier: Apache-2.0
"""Runs train.py under each strategy, in processes of its own, shows how far it is, and compares the results.

Nothing here needs TensorFlow. A run writes a line per epoch to `epochs.jsonl`, which is read for the display, the table
and the plot; whatever it prints goes to `log.txt`, which is shown if the run fails.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import plot

from tfdist.launchers.supervise import output, processes

HERE = pathlib.Path(__file__).resolve().parent
STRATEGIES = {
    "one_device": "one device",
    "mirrored": "mirrored, 2 devices",
    "multi_worker": "multi-worker, 2 processes",
    "parameter_server": "parameter server, 2 workers, 1 ps",
}
_POLL_SECS = 0.2
_LINE_EVERY_SECS = 5.0
_WIDTH = max(map(len, STRATEGIES.values()))
# For readable logs only; a user's own values stay.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}

Row = dict[str, Any]


def compare(output_dir: pathlib.Path, epochs: int, arguments: list[str]) -> int:
    """Trains under every strategy, prints one table and saves the plot.

    Args:
      output_dir: one folder per strategy is made in it, beside `digits.png` and `summary.json`.
      epochs: how many lines each run will write.
      arguments: flags handed to `run.py`.

    Returns:
      The exit code: 0 if every strategy reached the accuracy in `expected.json`.
    """
    print(f"Training on scikit-learn's digits under {len(STRATEGIES)} strategies, {epochs} epochs each.\n", flush=True)
    histories: dict[str, list[Row]] = {}
    problems: list[str] = []
    for strategy in STRATEGIES:
        histories[strategy], problem = _run(strategy, output_dir / strategy, epochs, arguments)
        problems.extend([problem] if problem else [])
    summary = {strategy: summarize(rows) for strategy, rows in histories.items() if rows}
    _print_table(summary)
    _save(output_dir, summary)
    problems.extend(missed(summary))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _run(strategy: str, run_dir: pathlib.Path, epochs: int, arguments: list[str]) -> tuple[list[Row], str | None]:
    """One strategy's rows, and what went wrong, if anything did."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    display = Display(STRATEGIES[strategy], epochs)
    # Whatever ends this program, Ctrl-C and SIGKILL included, the supervisor ends the run with all its processes.
    with LogFile(run_dir / "log.txt") as log, processes.Supervisor(log) as supervisor:
        process = supervisor.start(strategy, _command(strategy, arguments), _environment())
        while supervisor.wait_first_exit(_POLL_SECS) is None:
            display.show(rows_of(run_dir))
        process.wait()
    rows = rows_of(run_dir)
    if process.returncode or len(rows) < epochs:
        display.fail("\n".join(process.tail))
        return rows, f"{strategy} ended with exit code {process.returncode}; all it printed is in {run_dir / 'log.txt'}"
    display.done(rows)
    return rows, None


def _command(strategy: str, arguments: list[str]) -> list[str]:
    script = [str(HERE / "run.py"), f"--strategy={strategy}", *arguments]
    if strategy == "multi_worker":
        return [sys.executable, "-m", "tfdist", "launch", "local", "--num_workers=2", *script]
    return [sys.executable, *script]


def _environment() -> dict[str, str]:
    """A user's own, less the cluster that this program may itself be a part of: it compares on one machine."""
    return {name: value for name, value in (_QUIET | os.environ).items() if name != "TF_CONFIG"}


def rows_of(run_dir: pathlib.Path) -> list[Row]:
    path = run_dir / "epochs.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # The last line may be half written.
    return [json.loads(line) for line in lines if line.endswith("\n")]


class LogFile(output.Console):
    """A console that is a file, without prefixes."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._file = path.open("w", buffering=1, encoding="utf-8")

    def write(self, prefix: str, lines: Iterable[str], error: bool = False, number: int | None = None) -> None:
        self._file.writelines(f"{line}\n" for line in lines)

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()


class Display:
    """One line that follows a run: rewritten in place on a terminal, else repeated every few seconds."""

    def __init__(self, title: str, epochs: int):
        self._title, self._epochs = title, epochs
        self._live = sys.stdout.isatty()
        self._start = self._last = time.monotonic()
        self._write("starting")

    def show(self, rows: list[Row]) -> None:
        now = time.monotonic()
        if self._live or now - self._last >= _LINE_EVERY_SECS:
            self._last = now
            self._write(self._progress(rows) if rows else f"starting, {now - self._start:.0f} s")

    def done(self, rows: list[Row]) -> None:
        self._write(f"{self._progress(rows)}, {time.monotonic() - self._start:.0f} s in all", end="\n")

    def fail(self, tail: str) -> None:
        self._write(f"failed; the end of what it printed:\n{tail}", end="\n")

    def _progress(self, rows: list[Row]) -> str:
        done = round(20 * len(rows) / self._epochs)
        bar = "#" * done + "." * (20 - done)
        return f"[{bar}] epoch {len(rows):2d}/{self._epochs}, validation accuracy {rows[-1]['val_accuracy']:.2%}"

    def _write(self, text: str, end: str | None = None) -> None:
        line = f"{self._title:{_WIDTH}}  {text}"
        if self._live:
            # Back to the first column; what is left of a longer line is erased.
            sys.stdout.write(f"\r{line}\x1b[K{end or ''}")
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def summarize(rows: list[Row]) -> Row:
    # The first epoch builds the graph, which says nothing about the speed of an update.
    speeds = [row["updates_per_sec"] for row in rows[1:]] or [rows[0]["updates_per_sec"]]
    return {
        "seconds": rows[-1]["seconds"],
        "updates": sum(row["updates"] for row in rows),
        "updates_per_sec": statistics.median(speeds),
        "validation_accuracy": rows[-1]["val_accuracy"],
    }


def _print_table(summary: dict[str, Row]) -> None:
    print(f"\n{'strategy':{_WIDTH}}  seconds  updates/s  validation accuracy")
    for strategy, row in summary.items():
        print(
            f"{STRATEGIES[strategy]:{_WIDTH}}  {row['seconds']:7.1f}  {row['updates_per_sec']:9.0f}  "
            f"{row['validation_accuracy']:19.2%}"
        )


def _save(output_dir: pathlib.Path, summary: dict[str, Row]) -> None:
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if summary:
        print(f"\nplot         {_short(plot.save(output_dir, STRATEGIES))}")
        tensorboard = pathlib.Path(sys.executable).with_name("tensorboard")
        print(f"TensorBoard  {_short(tensorboard)} --logdir {_short(output_dir)}", flush=True)


def _short(path: pathlib.Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def missed(summary: dict[str, Row]) -> list[str]:
    expected = json.loads((HERE / "expected.json").read_text())
    problems = []
    for strategy, row in summary.items():
        least = expected[strategy]["validation_accuracy_at_least"]
        if row["validation_accuracy"] < least:
            got = f"{row['validation_accuracy']:.2%}"
            problems.append(f"{strategy} reached a validation accuracy of {got}; expected.json wants {least:.0%}")
    return problems
