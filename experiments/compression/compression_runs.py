# SPDX-License-Identifier: Apache-2.0
"""Starts the runs, one after another, and compares bytes and accuracy. Nothing here needs TensorFlow."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import compression_chart

from tfdist.launchers import processes

HERE = pathlib.Path(__file__).resolve().parent
SETTING = ("batch_size", "learning_rate", "seed")
NUM_WORKERS = 2
# Inputs, hidden layers and classes of the dense net.
DENSE_UNITS = (64, 3000, 3000, 1800, 10)
DENSE_PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(DENSE_UNITS))
NETS = {"digits": "convolutional", "dense": "dense"}
_LIMIT_SECS = 900.0
# For readable logs only; a user's own values stay.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Codec:
    """Name of a class of `tfdist.compression`, empty for uncompressed training, and its arguments."""

    kind: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        shown = ", ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value:g}"
            for name, value in self.arguments.items()
        )
        return f"{self.kind}({shown})" if self.kind else "uncompressed"

    @property
    def family(self) -> str:
        """Codecs that differ in one number only, which a line joins in the plot."""
        if self.kind == "Threshold":
            return "Threshold, fixed tau" if "tau" in self.arguments else "Threshold, adaptive"
        return self.kind or "uncompressed"

    @property
    def density(self) -> str:
        """Share of the values that is sent; that of a fixed tau follows from the gradients."""
        found = self.arguments.get("max_density", self.arguments.get("density"))
        if found is not None:
            return f"{found:g}"
        return "" if self.kind in ("Threshold", "PowerSGD") else "1"


def _adaptive(max_density: float) -> Codec:
    return Codec("Threshold", {"max_density": max_density, "min_density": max_density / 10})


CODECS = {
    "none": Codec(""),
    "float16": Codec("HalfPrecision", {"dtype": "float16"}),
    "bfloat16": Codec("HalfPrecision", {"dtype": "bfloat16"}),
    **{f"threshold-{name}": _adaptive(float(name)) for name in ("1e-2", "2.5e-3", "1e-3", "1e-4")},
    **{f"tau-{name}": Codec("Threshold", {"tau": float(name)}) for name in ("1e-4", "1e-3", "1e-2")},
    **{f"topk-{name}": Codec("TopK", {"density": float(name)}) for name in ("1e-2", "1e-3")},
    "signsgd": Codec("SignSGD"),
    **{f"powersgd-{rank}": Codec("PowerSGD", {"rank": rank}) for rank in (1, 4)},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: a net and a key of `CODECS`."""

    net: str
    codec_name: str

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.net}-{self.codec_name}"

    @property
    def codec(self) -> Codec:
        return CODECS[self.codec_name]

    @property
    def label(self) -> str:
        """Its number among codecs of the same family, such as a density."""
        return self.codec_name.partition("-")[2]


def runs(nets: Iterable[str], codecs: Iterable[str]) -> list[Run]:
    """All runs, in the order of `NETS` and `CODECS`."""
    nets, codecs = set(nets), set(codecs)
    return [Run(net, codec) for net in NETS if net in nets for codec in CODECS if codec in codecs]


def find(name: str) -> Run | None:
    return next((run for run in runs(NETS, CODECS) if run.name == name), None)


def compare(output_dir: pathlib.Path, todo: Sequence[Run], settings: Mapping[str, Row], reuse: bool) -> int:
    """Trains all runs, prints the tables and saves the plot.

    Args:
      output_dir: one folder per run is made in it, beside `compression.png`, `table.md` and `summary.json`.
      todo: the runs.
      settings: by net, its epochs and the values of the flags in `SETTING`.
      reuse: whether to keep the results of complete runs of the same setting.

    Returns:
      The exit code: 0 if all is as `expected.json` wants it.
    """
    summary: dict[str, Row] = {}
    problems: list[str] = []
    for run in todo:
        setting, run_dir = settings[run.net], output_dir / run.name
        problem = None if reuse and is_complete(run, setting, run_dir) else train(run, setting, run_dir)
        if problem:
            problems.append(problem)
            continue
        summary[run.name] = summarize(run, run_dir)
        print(progress(run, summary[run.name]), flush=True)
    tables = [table(net, summary) for net in NETS if any(run.net == net for run in todo)]
    if "dense-none" in summary:
        tables.append(strom_table(summary))
    text = "\n\n".join(tables)
    print(f"\n{text}", flush=True)
    (output_dir / "table.md").write_text(text + "\n")
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
    """Command that starts both workers. By MPI each message has its own length."""
    launch = ["-m", "tfdist.cli", "launch", "local", f"--num_workers={NUM_WORKERS}", "--communication=mpi"]
    flags = [f"--{run.net}_epochs={setting['epochs']}", *(f"--{name}={setting[name]}" for name in SETTING)]
    return [sys.executable, *launch, str(HERE / "run.py"), f"--run={run.name}", f"--output_dir={run_dir}", *flags]


def train(run: Run, setting: Mapping[str, Any], run_dir: pathlib.Path) -> str | None:
    """Trains once; returns an error, or None."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    own = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    # However this program ends, the supervisor ends the run with all its processes.
    with processes.Supervisor() as supervisor:
        process = supervisor.start(run.name, command(run, setting, run_dir), _QUIET | own)
        ended = process.wait(_LIMIT_SECS)
    if ended == 0:
        return None
    how = f"ended with exit code {ended}" if ended is not None else f"did not end within {_LIMIT_SECS:.0f} s"
    return f"{run.name} {how}; the end of its output:\n" + "\n".join(process.tail)


def summarize(run: Run, run_dir: pathlib.Path) -> Row:
    """Returns bytes per update and worker after the first epoch, accuracy and seconds of a run."""
    rows = [json.loads(text) for text in (run_dir / "epochs.jsonl").read_text().splitlines()]
    full = 4 * json.loads((run_dir / "run.json").read_text())["parameters"]
    # In the first epoch an adaptive tau is still on its way.
    later = rows[1:] or rows
    sent = sum(row["bytes"] for row in later) / sum(row["updates"] for row in later)
    # Without the policy nothing counts; an all-reduce sends 2 (n - 1) / n of all values, which is 1 for two workers.
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


def progress(run: Run, row: Row) -> str:
    """A run's line while the others are still to come."""
    return (
        f"{run.net:6}  {row['codec']:44}  {row['bytes']:12,.0f} bytes per update  "
        f"{times(row['share']):>9}  {row['accuracy']:7.2%}  {row['seconds']:6.1f} s"
    )


def times(share: float) -> str:
    """How many times less than float32."""
    return f"{1 / share:,.2f}" if share > 0.095 else f"{1 / share:,.0f}"


def table(net: str, summary: Mapping[str, Row]) -> str:
    """Returns the table of a net in Markdown: a line per codec and density."""
    lines = [
        f"| {NETS[net]} net | density | bytes per update | times less | validation accuracy | validation loss | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary.values():
        if row["net"] == net:
            lines.append(
                f"| {_code(row['codec'])} | {row['density']} | {row['bytes']:,.0f} | {times(row['share'])} | "
                f"{row['accuracy']:.2%} | {row['loss']:.4f} | {row['seconds']:.0f} |"
            )
    return "\n".join(lines)


def _code(title: str) -> str:
    return f"`{title}`" if "(" in title or title[0].isupper() else title


# Strom 2015, table of bytes per minibatch of 14.6 M parameters: setting, bytes, and the codecs of ours beside it.
STROM = [
    ("float32", 58.4e6, ["none"]),
    ("float16", 29.2e6, ["float16"]),
    ("tau=2", 0.21e6, ["tau-1e-4", "tau-1e-3"]),
    ("tau=2, entropy coded", 0.21e6 / 3, ["threshold-2.5e-3"]),
    ("tau=15 (accuracy suffers)", 4.5e3, ["tau-1e-2", "threshold-1e-4"]),
]


def strom_table(summary: Mapping[str, Row]) -> str:
    """Returns Strom's published table next to ours, in Markdown."""
    lines = [
        "| Strom 2015 | bytes | times less | dense net | bytes | times less | behind uncompressed |",
        "|---|---|---|---|---|---|---|",
    ]
    full, best = STROM[0][1], summary["dense-none"]["accuracy"]
    for setting, size, names in STROM:
        theirs = f"{setting} | {_size(size)} | {times(size / full)}"
        for row in (summary[f"dense-{name}"] for name in names if f"dense-{name}" in summary):
            ours = f"{_code(row['codec'])} | {_size(row['bytes'])} | {times(row['share'])}"
            lines.append(f"| {theirs} | {ours} | {100 * (best - row['accuracy']):.2f} points |")
            theirs = "| |"
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def missed(summary: Mapping[str, Row], expected: Mapping[str, Any]) -> list[str]:
    """Returns a line for each expectation that is not met, of the nets and codecs that have run."""
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
        adaptive = [row for row in rows if row["family"] == "Threshold, adaptive"]
        uncompressed = next((row for row in rows if row["family"] == "uncompressed"), None)
        if uncompressed and adaptive:
            problems += _missed_by_thresholds(net, adaptive, uncompressed, wanted)
    return problems


def _missed_by_thresholds(net: str, rows: Sequence[Row], uncompressed: Row, wanted: Mapping[str, Any]) -> list[str]:
    share, behind = wanted["threshold_share_at_most"], wanted["threshold_behind_uncompressed_at_most"]
    # Accuracies are multiples of 1/360.
    least = uncompressed["accuracy"] - behind - 1e-6
    if any(row["share"] <= share and row["accuracy"] >= least for row in rows):
        return []
    got = "; ".join(f"{row['codec']}: 1/{times(row['share'])}, {row['accuracy']:.2%}" for row in rows)
    problem = (
        f"{net}: no adaptive Threshold sends at most 1/{times(share)} of the bytes of float32 with an accuracy within "
        f"{100 * behind:g} points of the {uncompressed['accuracy']:.2%} of uncompressed training: {got}"
    )
    return [problem]
