# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist advise PROFILE`. It imports no TensorFlow."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import statistics
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
from tfdist.planning.candidates import MULTI_WORKER, PARAMETER_SERVER

_USAGE = """\
usage: tfdist advise [FLAGS] PROFILE

Predicts the throughput of a training script on several workers, and recommends one setting, or one device. PROFILE is a
file of tfdist profile, or a directory with the update log of a run (tfdist.callbacks.Telemetry).

  tfdist profile train.py && tfdist advise profile.json --workers=1,2,4,8,16,64 --network=10Gbit
  tfdist advise profile.json --network=network.json --examples=1e9 --price-per-hour=3.06 --plot=advice.png

Intervals are of 90 %. --network takes a file of tfdist doctor --measure, too, and "local" for workers on this machine.

flags:
"""
_MOST_WORKERS = 10_000
FORMAT, VERSION = "tfdist advice", 1


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist advise`.

    Args:
      arguments: the command line after the command's name; flags may stand before or after PROFILE, and have dashes for
        underscores.

    Returns:
      0.

    Raises:
      FlagError: a flag is unknown or its value can't be parsed.
      LaunchError: the profile, or a value, is invalid.
    """
    values, rest = command_line.parse(define_flags, arguments, is_anywhere=True)
    if values.help:
        sys.stdout.write(_USAGE + command_line.describe(values))
        return 0
    if len(rest) != 1:
        raise LaunchError(f"give one profile: tfdist advise profile.json; see tfdist advise --help. Received: {rest}")
    try:
        return _advise(values, rest[0])
    except ValueError as error:
        raise LaunchError(str(error)) from None


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `tfdist advise`."""
    text, real = flags.DEFINE_string, flags.DEFINE_float
    flags.DEFINE_list("workers", "1,2,4,8,16,64", "numbers of workers to compare", flag_values=values)
    text(
        "network",
        "10Gbit",
        'bandwidth between machines, or a file of doctor --measure; "local" for one machine',
        flag_values=values,
    )
    text(
        "latency", None, "latency of a message, such as 50us; by default that of the file, or 50us", flag_values=values
    )
    real("examples", 0.0, "examples to train on, for times and costs", lower_bound=0.0, flag_values=values)
    real("price_per_hour", 0.0, "price of one machine, in any currency", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer(
        "workers_per_machine",
        None,
        "workers that share a machine's link and cores; by default 1, or all where the network is of one machine",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "global_batch",
        0,
        "examples of an update; 0 keeps the profile's batch on each worker",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_boolean("all", False, "show slow candidates, too; --json has them always", flag_values=values)
    text("json", None, "file for the rows and the recommendation, for programs", flag_values=values)
    text("plot", None, "file for a plot of throughput against workers", flag_values=values)


def _advise(values: flags.FlagValues, path: str) -> int:
    measured = _profile(pathlib.Path(path))
    links = prediction.from_flag(values.network, values.latency, measured.device == "GPU")
    workers = [_workers(text) for text in values.workers]
    question = advice.Question(
        workers=workers,
        examples=_finite("examples", values.examples),
        price_per_hour=_finite("price_per_hour", values.price_per_hour),
        workers_per_machine=values.workers_per_machine or (max(workers) if links.is_one_machine else 1),
        global_batch=values.global_batch,
    )
    if question.price_per_hour and not question.examples:
        raise ValueError("--price-per-hour needs --examples, the number of examples to train on, to say what they cost")
    found = advice.rows(measured, links, question)
    chosen = advice.recommended(found)
    sentence, *reasons = advice.in_words(found, chosen, measured)
    _write_head(measured, links, question)
    write_table(found if values.all else worth_showing(found, chosen), chosen, sys.stdout)
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    sys.stdout.write(
        "\n" + "".join(f"{line}\n" for line in (f"recommendation: {sentence}", *_wrapped(wrapper, reasons)))
    )
    if values.json:
        _files.write(values.json, _to_json(found, chosen, [sentence, *reasons], links))
    if values.plot:
        save_chart(pathlib.Path(values.plot), found, chosen, f"{measured.script or path} on {links.text}")
    return 0


def _wrapped(wrapper: textwrap.TextWrapper, reasons: Sequence[str]) -> list[str]:
    # Code stays in one piece, to be copied.
    return [f"- {each}" if each.startswith("write ") else wrapper.fill(f"- {each}") for each in reasons]


def _profile(path: pathlib.Path) -> profile.Profile:
    if path.is_dir():
        return profile.load_log(path)
    return profile.load(path)


def _workers(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise ValueError(f"--workers must be integers from 1 to {_MOST_WORKERS}, such as 1,2,4,8. Received: {text!r}")
    return int(text)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"--{name} must be a finite number. Received: {value}")
    return value


def _write_head(measured: profile.Profile, links: prediction.Network, question: advice.Question) -> None:
    noise, tables = measured.noise_scale, len(measured.tables)
    lines = [
        f"profile: {measured.script or measured.model}, {measured.batch_size} examples a step on one {measured.device}"
    ]
    if measured.dense_bytes or tables:
        sparse = f" and {tables} sparse table{'s' * (tables > 1)}" if tables else ""
        lines.append(f"gradients: {measured.dense_bytes / 1e6:.3g} MB{sparse}")
    if measured.fastest_worker:
        alone, mean = (1e3 * statistics.fmean(each) for each in (measured.alone, measured.samples))
        lines.append(
            f"one device: {measured.fastest_worker}, the fastest, {alone:.3g} ms a step; mean of all {mean:.3g} ms"
        )
    lines.append(f"network: {links.text}")
    here = min(max(question.workers), question.workers_per_machine)
    if here > 1:
        lines.append(f"machine: {_cores(measured, here)}")
    if measured.is_busy:
        lines.append(f"warning: {measured.busy_in_words}")
    if noise and noise.is_known:
        lines.append(f"gradient noise scale: {noise.value:.3g} examples ({noise.low:.3g} to {noise.high:.3g})")
    sys.stdout.write("\n".join(lines) + "\n\n")


def _cores(measured: profile.Profile, workers: int) -> str:
    if not measured.used_cores:
        return f"up to {workers} workers; the profile does not say how many cores a step uses"
    slower = prediction.slowdown(measured, workers)
    text = f"{measured.cores} cores, of which a step uses {measured.used_cores:.1f}"
    return text + (f"; {workers} workers on it take {slower:.1f} times as long" if slower > 1 else "")


def _to_json(found: Sequence[advice.Row], chosen: advice.Row, words: Sequence[str], links: prediction.Network) -> str:
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "network": {"bytes_per_sec": links.bandwidth, "latency_secs": links.latency_secs, "text": links.text},
        "rows": [row.to_dict() for row in found],
        "recommended": found.index(chosen),
        "recommendation": words[0],
        "reasons": list(words[1:]),
    }
    return json.dumps(content, indent=1) + "\n"


# The table of `tfdist advise`.


# Width of the output if neither terminal nor COLUMNS says it.
_WIDTH = 100
_SHOWN_FROM = 0.5
# Columns that go first where the table is too wide.
_LESS_NEEDED = ("90 % interval", "to a loss", "limit", "efficiency")
_STRATEGIES = {MULTI_WORKER: "multi-worker", PARAMETER_SERVER: "parameter server"}


def write_table(found: Sequence[Row], chosen: Row, stream: Any) -> None:
    """Writes the table as wide as the terminal, or COLUMNS, says; in colour where the stream is a terminal."""
    # Only here, because importing rich takes a while.
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    header, lines = table_cells(found, width)
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in ("strategy", "policies", "limit") else "right", no_wrap=True)
    for row, line in zip(found, lines, strict=True):
        table.add_row(*line, style="bold green" if row is chosen else None)
    Console(file=stream, width=max(width, _needed(header, lines)), highlight=False, markup=False).print(table)


def worth_showing(found: Sequence[Row], chosen: Row) -> list[Row]:
    """Returns the rows without those that make less than half of the best with as many workers, and are no baseline."""
    best: dict[int, float] = {}
    for row in found:
        best[row.workers] = max(best.get(row.workers, 0.0), row.prediction.examples_per_sec)
    return [row for row in found if row is chosen or _is_worth_showing(row, best[row.workers])]


def _is_worth_showing(row: Row, best: float) -> bool:
    is_baseline = row.candidate is None or row.candidate.label in ("synchronous", "asynchronous")
    return is_baseline or row.prediction.examples_per_sec >= _SHOWN_FROM * best


def table_cells(found: Sequence[Row], width: int = 1000) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns, and the texts of each row: as many columns as `width` characters have room for.

    Columns that nothing is known of are left out.
    """
    rows = [_row_cells(row) for row in found]
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in ("", *_LESS_NEEDED):
        header = [each for each in header if each != name]
        lines = [[row[each] for each in header] for row in rows]
        if _needed(header, lines) <= width:
            break
    return header, lines


def _needed(header: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Width of a table, with a space between columns."""
    return sum(max(map(len, column)) + 1 for column in zip(header, *lines, strict=True)) - 1


def _row_cells(row: Row) -> dict[str, str]:
    own, predicted, estimate = row.candidate, row.prediction, row.speedup_to_loss
    return {
        "workers": str(row.workers),
        "ps": str(own.servers) if own and own.servers else "",
        "strategy": _STRATEGIES[own.strategy] if own else "one device",
        "policies": own.label if own else "",
        "examples/s": advice.number_text(predicted.examples_per_sec),
        "90 % interval": f"{advice.number_text(predicted.low)} to {advice.number_text(predicted.high)}",
        "efficiency": f"{predicted.efficiency:.0%}",
        "time": advice.duration_text(row.secs.value) if row.secs else "",
        "cost": advice.number_text(row.cost.value) if row.cost else "",
        "to a loss": f"{estimate.value:.1f}x" if own and estimate and estimate.says_something else "",
        "limit": row.limit.short,
    }


# Plot of throughput against workers, with intervals. It needs matplotlib.


# Okabe and Ito, which colour-blind readers can tell apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#999999")


def save_chart(path: pathlib.Path, found: Sequence[Row], chosen: Row, title: str) -> None:
    """Saves the plot.

    Raises:
      ValueError: matplotlib is not installed, or can't write such a file.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError('--plot needs matplotlib; pip install "tfdist[experiments]"') from None
    matplotlib.use("agg")  # draws into a file; needs no display
    from matplotlib import pyplot as plt

    single = found[0].prediction.examples_per_sec
    counts = sorted({row.workers for row in found})
    figure, axes = plt.subplots(figsize=(9.0, 5.2), layout="constrained")
    axes.plot(counts, [single * count for count in counts], color="0.6", linestyle=":", label="linear")
    for colour, (name, rows) in zip(_COLOURS, _best_lines(found).items(), strict=False):
        x = [row.workers for row in rows]
        axes.plot(
            x, [row.prediction.examples_per_sec for row in rows], color=colour, marker="o", markersize=4, label=name
        )
        low, high = [row.prediction.low for row in rows], [row.prediction.high for row in rows]
        axes.fill_between(x, low, high, color=colour, alpha=0.12)
    axes.plot(
        [chosen.workers],
        [chosen.prediction.examples_per_sec],
        "o",
        markersize=14,
        fillstyle="none",
        color="black",
        markeredgewidth=1.6,
        label="recommended",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("workers")
    axes.set_ylabel("examples per second, 90 % interval")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ValueError(f"--plot: {error}. Received: {str(path)!r}") from None
    finally:
        plt.close(figure)


def _best_lines(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each kind of candidate, with the best number of servers and of spares."""
    lines: dict[str, dict[int, Row]] = {}
    for row in found[1:]:
        if row.candidate is None:
            continue
        short = {"MultiWorkerMirroredStrategy": "multi-worker", "ParameterServerStrategy": "parameter server"}
        label = "spares" if row.candidate.spares else row.candidate.label
        own = lines.setdefault(f"{short[row.candidate.strategy]}, {label}", {1: found[0]})
        best = own.get(row.workers)
        if best is None or row.prediction.examples_per_sec > best.prediction.examples_per_sec:
            own[row.workers] = row
    return {name: [own[count] for count in sorted(own)] for name, own in lines.items()}
