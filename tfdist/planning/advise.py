# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist advise PROFILE|LOGDIR`. It imports no TensorFlow."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfdist import _files
from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.planning import advice, prediction, profile
from tfdist.planning.advice import Row

_USAGE = """\
usage: tfdist advise [FLAGS] PROFILE
       tfdist advise [FLAGS] LOGDIR

Predicts the throughput of a training script on several workers, and recommends one setting, or one device. PROFILE is a
file of tfdist profile. Of LOGDIR, with the update log of a run (tfdist.callbacks.Telemetry), the newest run is replayed
with other spares, and with its fastest workers alone.

  tfdist profile train.py && tfdist advise profile.json --workers=1,2,4,8,16,64 --network=10Gbit
  tfdist advise profile.json --network=network.json --examples=1e9 --price-per-hour=3.06
  tfdist advise logs/run1

--network takes a file of tfdist doctor --measure, too, and "local" for workers on this machine.
"""
_MOST_WORKERS = 10_000
FORMAT, VERSION = "tfdist advice", 2
_DEFAULT_WORKERS = (1, 2, 4, 8, 16, 64)
# Width of the output if neither terminal nor COLUMNS says it.
_WIDTH = 100


def _run(values: flags.FlagValues, rest: Sequence[str]) -> int:
    """Returns the exit code: 1 if the replay of a run misses it, so it says nothing."""
    path = pathlib.Path(rest[0])
    if values.json:
        _files.check_writable(values.json, "--json")
    try:
        if values.price_per_hour and not values.examples:
            raise ValueError("--price-per-hour needs --examples, the number of examples to train on")
        workers = [_workers(text) for text in values.workers or ()]
        return _of_log(values, path, workers) if path.is_dir() else _of_profile(values, path, workers)
    except (OSError, ValueError) as error:
        raise LaunchError(" ".join(str(error).split())) from None


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist advise`."""
    kinds = flags.DEFINE_string, flags.DEFINE_float, flags.DEFINE_integer, flags.DEFINE_boolean
    text, real, count, switch = (functools.partial(kind, flag_values=values) for kind in kinds)
    compared = "numbers of workers to compare (1,2,4,8,16,64; of a run those up to its own)"
    flags.DEFINE_list("workers", None, compared, flag_values=values)
    network = 'bandwidth between machines, or a file of doctor --measure; "local" for one machine (10Gbit)'
    text("network", None, network)
    text("latency", None, "of a message, such as 50us; by default that of the file, or 50us")
    real("examples", 0.0, "examples to train on, for times and costs", lower_bound=0.0)
    real("price_per_hour", 0.0, "price of one machine, in any currency", lower_bound=0.0)
    sharing = "workers that share a machine's link and cores; by default 1, or all where the network is of one machine"
    count("workers_per_machine", None, sharing, lower_bound=1)
    count("global_batch", 0, "examples of an update; 0 keeps the profile's batch on each worker", lower_bound=0)
    any_cost = f"recommend settings of more than {advice.MOST_COST:g} times the machine-hours of an example, too"
    switch("any_cost", False, any_cost)
    switch("all", False, "show slow settings, too; --json has them always")
    text("json", None, "file for the rows and the recommendation, for programs")


main = functools.partial(command_line.run_command, _USAGE, define_flags, run=_run, takes="PROFILE or LOGDIR")


def _workers(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise ValueError(f"--workers must be integers from 1 to {_MOST_WORKERS}, such as 1,2,4,8. Received: {text!r}")
    return int(text)


def _of_profile(values: flags.FlagValues, path: pathlib.Path, given: Sequence[int]) -> int:
    measured = profile.load(path)
    links = prediction.from_flag(values.network or "10Gbit", values.latency, measured.device == "GPU")
    workers = given or _DEFAULT_WORKERS
    per_machine = values.workers_per_machine or (max(workers) if links.is_one_machine else 1)
    most_cost = math.inf if values.any_cost else advice.MOST_COST
    found = advice.rows(measured, links, workers, per_machine, values.global_batch)
    chosen = advice.recommended(found, measured, most_cost)
    words = advice.in_words(found, chosen, measured, most_cost)
    step = f"{measured.batch_size} examples a step on one {measured.device}"
    tables, here = len(measured.tables), min(max(workers), per_machine)
    sparse = f" and {tables} sparse table{'s' * (tables > 1)}" if tables else ""
    sent = f"{measured.dense_bytes / 1e6:.3g} MB{sparse}" if measured.dense_bytes or tables else ""
    is_slow = links.software_bandwidth < links.bandwidth
    lines = {
        "profile: ": f"{measured.script or measured.model}, {step}",
        "gradients: ": sent,
        "network: ": links.text,
        "TensorFlow sends at most ": f"{links.software_bandwidth / 0.125e9:.2g} Gbit/s from CPUs" if is_slow else "",
        "machine: ": _cores(measured, here) if here > 1 else "",
        "warning: ": measured.busy_in_words,
        "": str(measured.noise_scale or ""),
    }
    head = [f"{name}{text}" for name, text in lines.items() if text]
    shown = found if values.all else worth_showing(found, chosen)
    _write(values, head, found, shown, chosen, words, "examples", {"network": links.text})
    return 0


def _of_log(values: flags.FlagValues, path: pathlib.Path, given: Sequence[int]) -> int:
    # NumPy is imported only where it is used.
    from tfdist.planning import replay
    from tfdist.telemetry import update_log

    for name in ("network", "latency", "workers_per_machine", "global_batch", "any_cost"):
        if getattr(values, name):
            raise ValueError(
                f"--{name} is for profiles: a run is replayed on its own workers and links. Received: {path}"
            )
    timeline = update_log.read_logs(path)
    if too_many := [count for count in given if count > len(timeline.workers)]:
        raise ValueError(
            f"--workers: the run had {len(timeline.workers)} workers, and a log does not say what more would send; "
            f"tfdist profile measures that. Received: {too_many[0]}"
        )
    try:
        found = replay.advise(timeline, given)
    except replay.ReplayError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    size = found.examples or 1.0
    if values.examples and not found.examples:
        raise ValueError("--examples: the log of this run does not say how many examples a batch has; leave it out")
    single = max(case.gradients_per_sec for case in found.cases if len(case.workers) == 1) * size

    def row(case: replay.Case) -> Row:
        count, speed = len(case.workers), case.gradients_per_sec * size
        label = "as it ran" if case is found.cases[0] else "" if case.spares is None else f"spares={case.spares}"
        setting = advice.Setting(timeline.header.strategy, count, label)
        return Row(setting, speed, case.updates_per_sec, speed / (count * single), 0.0, count * single / speed, "")

    rows = [row(case) for case in found.cases]
    policies = ", ".join(timeline.header.policies)
    replayed = f"replay of {found.updates} updates: {found.cases[0].updates_per_sec:.3g} updates/s"
    head = [
        f"run: {path}, {len(timeline.workers)} workers, {timeline.header.strategy} {policies}".rstrip(),
        f"{replayed}; the run made {found.measured:.3g}",
    ]
    if found.examples:
        head.append(f"{found.examples:.0f} examples a step")
    chosen = rows[found.cases.index(found.chosen)]
    _write(values, head, rows, rows, chosen, [found.text], "examples" if found.examples else "batches", {})
    return 0


def _cores(measured: profile.Profile, workers: int) -> str:
    if not measured.used_cores:
        return f"up to {workers} workers; the profile does not say how many cores a step uses"
    slower = prediction.slowdown(measured, workers)
    text = f"{measured.cores} cores, of which a step uses {measured.used_cores:.1f}"
    return text + (f"; {workers} workers on it take {slower:.1f} times as long" if slower > 1 else "")


def worth_showing(found: Sequence[Row], chosen: Row) -> list[Row]:
    """Returns the rows without those that make less than half of the best with as many workers, and are no baseline."""

    def is_shown(row: Row) -> bool:
        best = max(each.examples_per_sec for each in found if each.setting.workers == row.setting.workers)
        is_baseline = row.setting.label in ("", "synchronous", "asynchronous")
        return row is chosen or is_baseline or row.examples_per_sec >= best / 2

    return list(filter(is_shown, found))


def _write(
    values: flags.FlagValues,
    head: Sequence[str],
    found: Sequence[Row],
    shown: Sequence[Row],
    chosen: Row,
    words: Sequence[str],
    unit: str,
    more: dict[str, Any],
) -> None:
    """Prints head, table and recommendation, and writes --json."""
    # Only here, because importing rich takes a while.
    from rich.console import Console
    from rich.table import Table

    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    cells = [_cells(values, row, unit) for row in shown]
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    names = [name for name in cells[0] if any(each[name] for each in cells)]
    for name in names:
        is_text = name in ("strategy", "policies", "limit")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row, each in zip(shown, cells, strict=True):
        table.add_row(*(each[name] for name in names), style="bold green" if row is chosen else None)
    sys.stdout.write("\n".join(head) + "\n\n")
    Console(file=sys.stdout, width=width, highlight=False, markup=False).print(table)
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    # Code stays in one piece, to be copied.
    reasons = [f"- {each}" if each.startswith("write ") else wrapper.fill(f"- {each}") for each in words[1:]]
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in (f"recommendation: {words[0]}", *reasons)))
    if values.json:
        content = {
            "format": FORMAT,
            "version": VERSION,
            **more,
            "unit": f"{unit}/s",
            "rows": [row.to_dict() for row in found],
            "recommended": next(index for index, row in enumerate(found) if row is chosen),
            "recommendation": words[0],
            "reasons": list(words[1:]),
        }
        _files.write(values.json, json.dumps(content, indent=1) + "\n")


def _cells(values: flags.FlagValues, row: Row, unit: str) -> dict[str, str]:
    own, secs = row.setting, values.examples / row.examples_per_sec
    short = {advice.MULTI_WORKER: "multi-worker", advice.PARAMETER_SERVER: "parameter server", "": "one device"}
    price = values.price_per_hour / 3600 * row.machines * secs
    return {
        "workers": str(own.workers),
        "ps": str(own.servers or ""),
        "strategy": short.get(own.strategy, own.strategy),
        "policies": own.label,
        "updates/s": number_text(row.updates_per_sec),
        f"{unit}/s": number_text(row.examples_per_sec),
        "efficiency": f"{row.efficiency:.0%}",
        "cost": f"{row.cost:.1f}x",
        "time": duration_text(secs) if secs else "",
        "price": number_text(price) if price else "",
        "limit": "full links" if row.limit.startswith("the link") else row.limit.partition(":")[0],
    }


def number_text(value: float) -> str:
    """Returns a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration_text(secs: float) -> str:
    """Returns a time such as 90 s, 12 min or 3.5 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * size:
            return f"{secs / size:.3g} {unit}"
    return f"{secs:.3g} s"
