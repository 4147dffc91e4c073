# SPDX-License-Identifier: Apache-2.0
"""Measures tfdist side by side with stock TensorFlow, in one run. README.md says what is measured and how.

python benchmarks/run.py                                       # the table, about an hour on 2 cores
python benchmarks/run.py --rows=parameter_server --sizes=tiny  # a part of it
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import arena
import asynchrony
import deaths
import distribution
import first_step
import launch_start
import sharded_tables
import startup
import telemetry
import traffic
import warmup
from absl import app, flags
from rows import STAGES, Measurement, Stage

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent


ROWS = tuple(dict.fromkeys(measurement.row for stage in STAGES for measurement in stage.measurements))
STRATEGIES = tuple(dict.fromkeys(stage.strategy for stage in STAGES))
BEFORE = "before"
SIZES = ("tiny", "1M", "25M", "deep")
# These need more than `make bench` installs, or measure something else than steps.
_ON_REQUEST = ("torch", "steps_per_execution", "more_workers", "backends", "compression", "transforms")
# Rows with a summary of their own: what measures each, and what makes the summary.
_SUMMED_UP: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
    "deaths": (lambda: deaths.measure(FLAGS.deaths_secs, _say), deaths.summary),
    "telemetry": (lambda: telemetry.measure(FLAGS.telemetry_pairs, _say), telemetry.summary),
    "traffic": (lambda: traffic.measure(_say), traffic.summary),
    "first_step": (lambda: first_step.measure(FLAGS.rounds or 5, _say), first_step.summary),
    "sharded_tables": (lambda: sharded_tables.measure(FLAGS.rounds or 9, _say), sharded_tables.summary),
    "cost": (lambda: distribution.measure_cost(FLAGS.sizes, FLAGS.rounds or 5, _say), distribution.cost_summary),
    "handoffs": (
        lambda: distribution.measure_handoffs(FLAGS.sizes, FLAGS.rounds or 5, _say),
        distribution.handoffs_summary,
    ),
    "launch_start": (lambda: launch_start.measure(FLAGS.rounds or 7, _say), launch_start.summary),
}
_EVERYTHING = (*ROWS, *asynchrony.ROWS, warmup.ROW, "startup", *_SUMMED_UP)

flags.DEFINE_list(
    "rows",
    [*(row for row in ROWS if row not in _ON_REQUEST), *asynchrony.ROWS, warmup.ROW, "startup"],
    f"What to measure; also: {', '.join((*_ON_REQUEST, *_SUMMED_UP))}.",
)
flags.DEFINE_list("sizes", list(SIZES), "Models to measure with.")
flags.DEFINE_list("strategies", list(STRATEGIES), "The strategies to measure them with.")
flags.DEFINE_integer("rounds", None, "Segments of each contender, if not those of each row.", lower_bound=1)
flags.DEFINE_float("segment_secs", None, "About how long a segment takes, if not as in each row.", lower_bound=0.1)
flags.DEFINE_float("deaths_secs", 120.0, "How long workers are killed in the row deaths.", lower_bound=10.0)
flags.DEFINE_integer("telemetry_pairs", 60, "Pairs of epochs in the row telemetry.", lower_bound=2)
flags.DEFINE_string(
    "against",
    None,
    "Checkout of another version, measured as one more rival, called before; for the rows that live in rows.py.",
)
flags.DEFINE_string("output", os.path.relpath(HERE / "results" / "latest.json"), "Where the samples go.")
flags.register_validator("rows", lambda rows: set(rows) <= set(_EVERYTHING), f"use any of {', '.join(_EVERYTHING)}")
flags.register_validator(
    "strategies", lambda names: set(names) <= set(STRATEGIES), f"use any of {', '.join(STRATEGIES)}"
)
flags.register_validator("sizes", lambda sizes: set(sizes) <= set(SIZES), f"use any of {', '.join(SIZES)}")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    started = time.monotonic()
    report: dict[str, Any] = {
        "environment": _environment(),
        "training": [],
        "startup": {},
        **{name: {} for name in _SUMMED_UP},
    }
    failures: list[str] = []
    load, cores = report["environment"]["load_average_before"], report["environment"]["cores"]
    if load > cores / 2:
        print(f"This machine is busy (load {load} on {cores} cores): expect wide quartiles.\n", flush=True)
    if set(FLAGS.rows) & {*ROWS, *asynchrony.ROWS, warmup.ROW}:
        _print_head()
    for stage in STAGES:
        for size in FLAGS.sizes:
            try:
                for result in _measure(stage, size):
                    report["training"].append(result)
                    _print_result(result)
            except arena.ContenderError as error:
                failures.append(f"{stage.strategy} {size}: {error}")
    for name, results in _own_rows():
        try:
            for result in results:
                _say("")
                report["training"].append(result)
                _print_result(result)
        except arena.ContenderError as error:
            failures.append(f"{name}: {error}")
    if "startup" in FLAGS.rows:
        report["startup"] = _measure_startup()
    for name, (measure, summary) in _SUMMED_UP.items():
        if name in FLAGS.rows:
            try:
                report[name] = measure()
            except arena.ContenderError as error:
                failures.append(f"{name}: {error}")
                continue
            _say("")
            print(f"\n{summary(report[name])}", flush=True)
    _write(report)
    print(f"\n{time.monotonic() - started:.0f} s; all samples are in {FLAGS.output}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def _measure(stage: Stage, size: str) -> Iterator[dict[str, Any]]:
    wanted = [m for m in stage.measurements if m.row in FLAGS.rows and size in m.sizes]
    if not wanted or stage.strategy not in FLAGS.strategies:
        return
    collected: list[dict[str, list[float]]] = [{} for _ in wanted]
    for start in range(1, stage.starts + 1):
        with contextlib.ExitStack() as stack:
            names = [f"{stage.strategy}/{contender}" for contender in stage.contenders]
            cluster = size, stage.num_workers, stage.num_ps
            teams = [stack.enter_context(arena.Team(name, *cluster)) for name in names]
            if FLAGS.against:
                checkout = pathlib.Path(FLAGS.against)
                teams.append(stack.enter_context(arena.Team(names[0], *cluster, checkout=checkout)))
            for team in teams:
                _say(f"{size}: starting {team.name}" + (f", {start} of {stage.starts}" if stage.starts > 1 else ""))
                team.wait_ready()
            for measurement, rates in zip(wanted, collected, strict=True):
                for contender, samples in _duel(stage, measurement, size, teams).items():
                    rates.setdefault(contender, []).extend(samples)
                if start == stage.starts:
                    yield from _results(stage, measurement, size, rates)


def _duel(stage: Stage, measurement: Measurement, size: str, teams: Sequence[arena.Team]) -> dict[str, list[float]]:
    """The rates of tfdist and of each rival, in steps per second by round; by contender, tfdist's first."""
    scenario, title = measurement.scenario, f"{measurement.row} {stage.strategy} {measurement.scenario.name} {size}"
    rounds = FLAGS.rounds or measurement.rounds
    before = [BEFORE] if FLAGS.against else []
    contenders = (*stage.contenders, *before)
    for team, contender in zip(teams, contenders, strict=True):
        spares = stage.spares if contender in (stage.contenders[0], BEFORE) else 0
        _say(f"{title}: warming up {team.name}")
        _warm_up(team, spares, stage, measurement)
    delays = lambda number: scenario.delays(number).to_json() if scenario.delays_by_worker else ""  # noqa: E731
    duel = arena.duel(teams, rounds, delays, lambda text: _say(f"{title}: {text}"))
    _say("")
    rates = dict(zip(contenders, duel.values(), strict=True))
    if "limit" in measurement.rivals:
        steps = teams[0].steps
        rates["limit"] = [scenario.limit(n, stage.spares, stage.num_replicas, steps) for n in range(rounds)]
    return rates


def _results(
    stage: Stage, measurement: Measurement, size: str, rates: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    head = {"row": measurement.row, "strategy": stage.strategy, "delays": measurement.scenario.name, "size": size}
    before = {BEFORE: None} if FLAGS.against else {}
    for rival, least in (measurement.rivals | before).items():
        yield head | {"rival": rival} | _compare(least, rates[stage.contenders[0]], rates[rival])
    for contender in measurement.changed if before else ():
        yield head | {"row": contender, "rival": BEFORE} | _compare(None, rates[contender], rates[BEFORE])


def _warm_up(team: arena.Team, spares: int, stage: Stage, measurement: Measurement) -> None:
    secs, scenario = FLAGS.segment_secs or measurement.segment_secs, measurement.scenario
    if not scenario.delays_by_worker:
        # Asynchronous workers each need several steps, or only the last one would count.
        is_asynchronous = stage.num_ps and not stage.num_replicas
        several = 4 * stage.num_workers if is_asynchronous else 1
        team.calibrate(secs, math.lcm(several, stage.multiple_of))
        return
    # Where delays say how long a step takes, no trial is needed.
    rate = statistics.mean(scenario.limit(seed, spares, stage.num_replicas, 100) for seed in range(10))
    team.prepare(max(2, round(secs * rate)))
    team.segment()


def _compare(least: float | None, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "target": least and round(least, 3),
        "met": None if least is None else statistics.median(ratios) >= least,
        "tfdist_steps_per_sec": ours,
        "rival_steps_per_sec": theirs,
    }


def _own_rows() -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """The rows that measure themselves, with a name each for errors; nothing runs before a result is asked for."""
    common = FLAGS.rounds, FLAGS.segment_secs, _compare, _say
    if asynchrony.STRATEGY in FLAGS.strategies:
        yield "asynchrony", asynchrony.measure(FLAGS.rows, *common)
    if warmup.ROW in FLAGS.rows and warmup.STRATEGY in FLAGS.strategies:
        yield "warmup", warmup.measure(FLAGS.sizes, *common)


def _measure_startup() -> dict[str, Any]:
    _say("startup")
    samples = startup.measure(FLAGS.rounds or 7)
    _say("")
    print(f"\n{'startup':24}  median s  target")
    for name, seconds in samples.items():
        most = startup.TARGETS[name]
        target = "" if most is None else f"<= {most}"
        print(f"{name:24}  {statistics.median(seconds):8.3f}  {target}", flush=True)
    return samples


_FORMAT = "{:16}  {:16}  {:>9}  {:>5}  {:>9}  {:>14}  {:>13}  {:>6}  {:>13}  {:>7}"


def _print_head() -> None:
    columns = ("row", "strategy", "delays", "size", "rival", "tfdist steps/s", "rival steps/s", "ratio", "quartiles")
    print(_FORMAT.format(*columns, "target"), flush=True)


def _print_result(result: dict[str, Any]) -> None:
    low, high = result["ratio_quartiles"]
    line = _FORMAT.format(
        result["row"],
        result["strategy"],
        result["delays"],
        result["size"],
        result["rival"],
        f"{statistics.median(result['tfdist_steps_per_sec']):.1f}",
        f"{statistics.median(result['rival_steps_per_sec']):.1f}",
        f"{result['ratio']:.3f}",
        f"{low:.3f}-{high:.3f}",
        f">= {result['target']:.2f}" if result["target"] else "",
    )
    missed = "  MISSED" if result["met"] is False else ""
    print(line.rstrip() + missed + asynchrony.summary(result), flush=True)


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
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # Of a rival that some rows do without.


def _write(report: dict[str, Any]) -> None:
    path = pathlib.Path(FLAGS.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
