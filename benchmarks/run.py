# SPDX-License-Identifier: Apache-2.0
"""Measures tfdist side by side with stock TensorFlow, in one run. README.md says what is measured and how.

python benchmarks/run.py                                       # everything, about 15 minutes on 2 cores
python benchmarks/run.py --rows=parameter_server --sizes=tiny  # a part of it
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

import arena
import startup
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Row:
    """Contenders that train the same model by turns.

    Attributes:
      rivals: by name, the least ratio of tfdist's steps per second to the rival's that we want.
      num_workers, num_ps: processes of each contender's cluster, a chief aside; 0 for one process.
    """

    rivals: dict[str, float]
    num_workers: int = 0
    num_ps: int = 0

    @property
    def multiple_of(self) -> int:
        """Steps come in multiples of this: asynchronous workers each need several, or only the last one would count."""
        return 4 * self.num_workers if self.num_ps else 1


ROWS = {
    # A step that takes at most 2 % longer.
    "mirrored": Row({"stock": 1 / 1.02}),
    "multi_worker": Row({"tf_keras": 1.0}, num_workers=2),
    "parameter_server": Row({"bare": 0.95, "tf_keras": 2.0}, num_workers=3, num_ps=1),
}
SIZES = ("tiny", "1M", "25M")
MOST_STARTUP_SECS = 0.5

flags.DEFINE_list("rows", [*ROWS, "startup"], "What to measure.")
flags.DEFINE_list("sizes", list(SIZES), "Models to measure with.")
flags.DEFINE_integer("rounds", 9, "Segments of each contender.", lower_bound=1)
flags.DEFINE_float("segment_secs", 1.5, "About how long a segment takes.", lower_bound=0.1)
flags.DEFINE_string("output", os.path.relpath(HERE / "results" / "latest.json"), "Where the samples go.")
flags.register_validator("rows", lambda rows: set(rows) <= {*ROWS, "startup"}, f"use any of {', '.join(ROWS)}, startup")
flags.register_validator("sizes", lambda sizes: set(sizes) <= set(SIZES), f"use any of {', '.join(SIZES)}")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    started = time.monotonic()
    report: dict[str, Any] = {"environment": _environment(), "rounds": FLAGS.rounds, "training": [], "startup": {}}
    failures = []
    load, cores = report["environment"]["load_average_before"], report["environment"]["cores"]
    if load > cores / 2:
        print(f"This machine is busy (load {load} on {cores} cores): expect wide quartiles.\n", flush=True)
    _print_head()
    for name in (name for name in FLAGS.rows if name in ROWS):
        for size in FLAGS.sizes:
            try:
                results = _measure(name, size)
            except arena.ContenderError as error:
                failures.append(f"{name} {size}: {error}")
                continue
            report["training"].extend(results)
            for result in results:
                _print_result(result)
    if "startup" in FLAGS.rows:
        report["startup"] = _measure_startup()
    _write(report)
    print(f"\n{time.monotonic() - started:.0f} s; all samples are in {FLAGS.output}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def _measure(name: str, size: str) -> list[dict[str, Any]]:
    row = ROWS[name]
    with contextlib.ExitStack() as stack:
        contenders = [f"{name}/{contender}" for contender in ("tfdist", *row.rivals)]
        teams = [stack.enter_context(arena.Team(c, size, row.num_workers, row.num_ps)) for c in contenders]
        rates = arena.duel(
            teams, FLAGS.rounds, FLAGS.segment_secs, row.multiple_of, lambda text: _say(f"{name} {size}: {text}")
        )
    _say("")
    ours, *theirs = contenders
    return [
        _compare(name, size, rival, least, rates[ours], rates[contender])
        for contender, (rival, least) in zip(theirs, row.rivals.items(), strict=True)
    ]


def _compare(name: str, size: str, rival: str, least: float, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "row": name,
        "size": size,
        "rival": rival,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "target": round(least, 3),
        "met": statistics.median(ratios) >= least,
        "tfdist_steps_per_sec": ours,
        "rival_steps_per_sec": theirs,
    }


def _measure_startup() -> dict[str, Any]:
    _say("startup")
    samples = startup.measure(FLAGS.rounds)
    _say("")
    print(f"\n{'startup':24}  median s  target")
    for name, seconds in samples.items():
        target = "" if name == "python -c pass" else f"<= {MOST_STARTUP_SECS}"
        print(f"{name:24}  {statistics.median(seconds):8.3f}  {target}", flush=True)
    return samples


_FORMAT = "{:16}  {:>5}  {:>9}  {:>14}  {:>13}  {:>6}  {:>13}  {:>7}"


def _print_head() -> None:
    head = ("row", "size", "rival", "tfdist steps/s", "rival steps/s", "ratio", "quartiles", "target")
    print(_FORMAT.format(*head), flush=True)


def _print_result(result: dict[str, Any]) -> None:
    low, high = result["ratio_quartiles"]
    line = _FORMAT.format(
        result["row"],
        result["size"],
        result["rival"],
        f"{statistics.median(result['tfdist_steps_per_sec']):.1f}",
        f"{statistics.median(result['rival_steps_per_sec']):.1f}",
        f"{result['ratio']:.3f}",
        f"{low:.3f}-{high:.3f}",
        f">= {result['target']:.2f}",
    )
    print(line + ("" if result["met"] else "  MISSED"), flush=True)


def _say(text: str) -> None:
    """Shows on a terminal what goes on; elsewhere only the results are printed."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r{text}\x1b[K")
        sys.stdout.flush()


def _environment() -> dict[str, Any]:
    packages = ("tfdist", "tensorflow", "keras", "tf_keras", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        # What else the machine was doing: well below the number of cores, or the numbers mean little.
        "load_average_before": round(os.getloadavg()[0], 2),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def _write(report: dict[str, Any]) -> None:
    path = pathlib.Path(FLAGS.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
