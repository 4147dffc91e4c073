# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, and compares bytes and accuracy. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import compression_chart
import compression_tables

# What the experiments share.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import training_process

HERE = pathlib.Path(__file__).resolve().parent
SETTING = ("warmup_epochs", "batch_size", "learning_rate", "seed")
NUM_WORKERS = 2
# Inputs, hidden layers and classes of the dense net.
DENSE_UNITS = (64, 3000, 3000, 1800, 10)
DENSE_PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(DENSE_UNITS))
# Title of each net.
NETS = {"digits": "Convolutional net", "dense": "Dense net"}
_LIMIT_SECS = 900.0

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Codec:
    """Class of `tfdist.compression` and its arguments. An empty `kind` is uncompressed training."""

    kind: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        shown = ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in self.arguments.items()
        )
        return f"{self.kind}({shown})" if self.kind else "uncompressed"

    @property
    def family(self) -> str:
        """Name of the line in the plot, whose points differ in one argument only."""
        if self.kind == "Threshold":
            return "Threshold, fixed tau" if "tau" in self.arguments else "Threshold, adaptive"
        if "bits" in self.arguments:
            return f"{self.kind}, {self.arguments['bits']} bits"
        return self.kind or "uncompressed"

    @property
    def density(self) -> str:
        """Fraction of the values that is sent; empty where it is not an argument."""
        found = self.arguments.get("max_density", self.arguments.get("density"))
        if found is not None:
            return f"{found:g}"
        return "" if self.kind in ("Threshold", "PowerSGD") else "1"


def _threshold(**arguments: float) -> Codec:
    # Strom's paper has no clipping of residuals.
    return Codec("Threshold", {**arguments, "clip_every": None})


def _adaptive(max_density: float) -> Codec:
    # A narrow band: by default the density may fall to a hundredth of its maximum.
    return _threshold(min_density=max_density / 2, max_density=max_density)


CODECS = {
    "none": Codec(),
    "float16": Codec("HalfPrecision", {"dtype": "float16"}),
    **{f"threshold-{name}": _adaptive(float(name)) for name in ("1e-2", "2e-3", "1e-3", "1e-4")},
    **{f"tau-{name}": _threshold(tau=float(name)) for name in ("2e-3", "2e-2")},
    **{f"topk-{name}": Codec("TopK", {"density": float(name)}) for name in ("1e-2", "1e-3")},
    "signsgd": Codec("SignSGD"),
    **{f"powersgd-{rank}": Codec("PowerSGD", {"rank": rank}) for rank in (1, 4)},
    "powersgd-4-4bit": Codec("PowerSGD", {"rank": 4, "bits": 4}),
}
# Families that have to reach the targets of bytes and accuracy.
_TARGETED = ("Threshold, adaptive", "PowerSGD, 4 bits")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: a key of `NETS` and a key of `CODECS`."""

    net: str
    codec_name: str

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.net}-{self.codec_name}"

    @property
    def codec(self) -> Codec:
        return CODECS[self.codec_name]

    @property
    def label(self) -> str:
        """Label of its point in the plot: the argument that differs within the family, such as a density."""
        kind, _, value = self.codec_name.partition("-")
        return {"tau": f"tau {value}", "powersgd": f"rank {value.partition('-')[0]}"}.get(kind, value)


def runs(nets: Iterable[str], codecs: Iterable[str]) -> list[Run]:
    """Returns all runs in the order of `NETS` and `CODECS`."""
    nets, codecs = set(nets), set(codecs)
    return [Run(net, codec) for net in NETS if net in nets for codec in CODECS if codec in codecs]


def find(name: str) -> Run | None:
    return next((run for run in runs(NETS, CODECS) if run.name == name), None)


def compare(output_dir: pathlib.Path, todo: Sequence[Run], settings: Mapping[str, Row], reuse: bool) -> int:
    """Trains runs; prints the tables and saves the plot of all complete runs of the same setting.

    Args:
      output_dir: gets a directory per run, `compression.png`, `table.md` and `summary.json`.
      todo: the runs.
      settings: by net, its epochs and the values of the flags in `SETTING`.
      reuse: True to keep the results of complete runs of the same setting.

    Returns:
      The exit code: 0 if all targets of `expected.json` are met.
    """
    problems: list[str] = []
    for run in todo:
        setting, run_dir = settings[run.net], output_dir / run.name
        problem = None if reuse and is_complete(run, setting, run_dir) else train(run, setting, run_dir)
        if problem:
            problems.append(problem)
        else:
            print(compression_tables.progress(summarize(run, run_dir)), flush=True)
    complete = [run for run in runs(NETS, CODECS) if is_complete(run, settings[run.net], output_dir / run.name)]
    summary = {run.name: summarize(run, output_dir / run.name) for run in complete}
    text = compression_tables.all_tables(summary, NETS)
    print(f"\n{text}", flush=True)
    (output_dir / "table.md").write_text(text)
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if summary:
        print(f"\nplot  {os.path.relpath(compression_chart.save(output_dir, summary, NETS))}", flush=True)
    problems += missed(summary, json.loads((HERE / "expected.json").read_text()))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def is_complete(run: Run, setting: Mapping[str, Any], run_dir: pathlib.Path) -> bool:
    path = run_dir / "run.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found.get("setting") == dict(setting) and found.get("codec") == run.codec.title


def command(run: Run, setting: Mapping[str, Any], run_dir: pathlib.Path) -> list[str]:
    """Returns the command that starts both workers. MPI sends each message at its own length."""
    launch = ["-m", "tfdist", "launch", "local", f"--num_workers={NUM_WORKERS}", "--communication=mpi"]
    flags = [f"--{run.net}_epochs={setting['epochs']}", *(f"--{name}={setting[name]}" for name in SETTING)]
    return [sys.executable, *launch, str(HERE / "run.py"), f"--run={run.name}", f"--output_dir={run_dir}", *flags]


def train(run: Run, setting: Mapping[str, Any], run_dir: pathlib.Path) -> str | None:
    """Trains once; returns an error, or None."""
    return training_process.run(run_dir, command(run, setting, run_dir), _LIMIT_SECS)


def summarize(run: Run, run_dir: pathlib.Path) -> Row:
    """Returns bytes per update and worker after the first epoch, accuracy and seconds of a run."""
    rows = [json.loads(text) for text in (run_dir / "epochs.jsonl").read_text().splitlines()]
    full = 4 * json.loads((run_dir / "run.json").read_text())["parameters"]
    # In the first epoch one worker trains alone, or an adaptive tau has not settled yet.
    later = rows[1:] or rows
    sent = sum(row["bytes"] for row in later) / sum(row["updates"] for row in later)
    # Uncompressed sums are not counted. An all-reduce over n workers sends 2 (n - 1) / n of all values.
    sent = sent if run.codec.kind else full * 2 * (NUM_WORKERS - 1) / NUM_WORKERS
    return {
        "net": run.net,
        "codec": run.codec.title,
        "family": run.codec.family,
        "label": run.label,
        "density": run.codec.density,
        "updates": sum(row["updates"] for row in rows),
        "bytes": sent,
        "share": sent / full,
        "accuracy": rows[-1]["val_accuracy"],
        "loss": rows[-1]["val_loss"],
        "seconds": rows[-1]["seconds"],
    }


def missed(summary: Mapping[str, Row], expected: Mapping[str, Any]) -> list[str]:
    """Returns a line for each target of `expected.json` that the completed runs miss."""
    problems = []
    for net, wanted in expected.items():
        rows = [row for row in summary.values() if row["net"] == net]
        low, high = wanted["half_precision_share_within"]
        for row in rows:
            if row["family"] == "HalfPrecision" and not low <= row["share"] <= high:
                problems.append(
                    f"{net}: {row['codec']} sends {row['share']:.4f} of the bytes of float32; expected.json wants "
                    f"{low} to {high}"
                )
        targeted = [row for row in rows if row["family"] in _TARGETED]
        uncompressed = next((row for row in rows if row["family"] == "uncompressed"), None)
        if uncompressed and targeted:
            problems += _missed_by_all(net, targeted, uncompressed, wanted)
    return problems


def _missed_by_all(net: str, rows: Sequence[Row], uncompressed: Row, wanted: Mapping[str, Any]) -> list[str]:
    share, behind = wanted["share_at_most"], wanted["behind_uncompressed_at_most"]
    # Accuracies are float32 multiples of 1/1800; the tolerance is below that.
    least = uncompressed["accuracy"] - behind - 1e-6
    if any(row["share"] <= share and row["accuracy"] >= least for row in rows):
        return []
    got = "; ".join(f"{row['codec']}: {compression_tables.ratio(row['share'])}, {row['accuracy']:.2%}" for row in rows)
    problem = (
        f"{net}: no codec sends at most {compression_tables.ratio(share)} of the bytes of float32 with an "
        f"accuracy within {100 * behind:g} points of the {uncompressed['accuracy']:.2%} of uncompressed training: {got}"
    )
    return [problem]
