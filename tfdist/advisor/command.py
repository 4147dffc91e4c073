# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist advise PROFILE`. It imports no TensorFlow."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfdist import _whole_files
from tfdist.advisor import advice, chart, network, prediction, profile, table
from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError

_USAGE = """\
usage: tfdist advise [FLAGS] PROFILE

Predicts what several workers would make of a training script, and recommends one setting, or one device. PROFILE is a
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
      absl.flags.Error: a flag is unknown or its value can't be parsed.
      LaunchError: the profile, or a value, is invalid.
    """
    values, rest = command_line.parse(define_flags, _flags_first(_underscored(arguments)))
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
    text("json", None, "where the rows and the recommendation go, for programs", flag_values=values)
    text("plot", None, "where a plot of throughput against workers goes", flag_values=values)


def _underscored(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the names of flags as absl has them: --price-per-hour=3 is --price_per_hour=3."""
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        found.append((name[:2] + name[2:].replace("-", "_") if name.startswith("--") else name) + equals + value)
    return found


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with PROFILE at the end, where users may write flags behind it."""
    names = flags.FlagValues()
    define_flags(names)
    found, others = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("-") and argument != "--":
            found.append(argument)
            name = argument.lstrip("-")
            has_value = "=" in argument or name not in names or names[name].boolean
            if not has_value and (value := next(rest, None)) is not None:
                found.append(value)
        elif argument != "--":
            others.append(argument)
    return found + others


def _advise(values: flags.FlagValues, path: str) -> int:
    measured = _profile(pathlib.Path(path))
    links = network.from_flag(values.network, values.latency, measured.device == "GPU")
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
    table.write(found if values.all else table.worth_showing(found, chosen), chosen, sys.stdout)
    sys.stdout.write(
        "\n" + "".join(f"{line}\n" for line in (f"recommendation: {sentence}", *(f"- {each}" for each in reasons)))
    )
    if values.json:
        _whole_files.write(values.json, _to_json(found, chosen, [sentence, *reasons], links))
    if values.plot:
        chart.save(pathlib.Path(values.plot), found, chosen, f"{measured.script or path} on {links.text}")
    return 0


def _profile(path: pathlib.Path) -> profile.Profile:
    if path.is_dir():
        from tfdist.advisor import log_profile

        return log_profile.load(path)
    return profile.load(path)


def _workers(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise ValueError(f"--workers must be integers from 1 to {_MOST_WORKERS}, such as 1,2,4,8. Received: {text!r}")
    return int(text)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"--{name} must be a finite number. Received: {value}")
    return value


def _write_head(measured: profile.Profile, links: network.Network, question: advice.Question) -> None:
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
    if noise and noise.is_known:
        lines.append(f"gradient noise scale: {noise.value:.3g} examples ({noise.low:.3g} to {noise.high:.3g})")
    sys.stdout.write("\n".join(lines) + "\n\n")


def _cores(measured: profile.Profile, workers: int) -> str:
    if not measured.used_cores:
        return f"up to {workers} workers; the profile does not say how many cores a step uses"
    slower = prediction.slowdown(measured, workers)
    text = f"{measured.cores} cores, of which a step uses {measured.used_cores:.1f}"
    return text + (f"; {workers} workers on it take {slower:.1f} times as long" if slower > 1 else "")


def _to_json(found: Sequence[advice.Row], chosen: advice.Row, words: Sequence[str], links: network.Network) -> str:
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
