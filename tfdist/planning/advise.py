# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist advise PROFILE|LOGDIR`. It imports no TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from tfdist import _files
from tfdist.launchers import command_line
from tfdist.launchers.requests import LaunchError
from tfdist.planning import prediction, profile
from tfdist.planning.prediction import Network
from tfdist.planning.profile import Profile
from tfdist.planning.simulation import CodecModel
from tfdist.planning.simulation.engines import MULTI_WORKER, PARAMETER_SERVER
from tfdist.policies import backup_workers
from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Policy
from tfdist.policies.compression import Compression
from tfdist.policies.parameter_averaging import ParameterAveraging

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
    any_cost = f"recommend settings of more than {MOST_COST:g} times the machine-hours of an example, too"
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
    most_cost = math.inf if values.any_cost else MOST_COST
    found = rows(measured, links, workers, per_machine, values.global_batch)
    chosen = recommended(found, measured, most_cost)
    words = in_words(found, chosen, measured, most_cost)
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
        setting = Setting(timeline.header.strategy, count, label)
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
    short = {MULTI_WORKER: "multi-worker", PARAMETER_SERVER: "parameter server", "": "one device"}
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


# Settings on several workers with their predictions from a profile, and one recommendation in words.


_EVERY_STEPS = 16
# More samples than this make the order statistics no better, and slower.
_MOST_SAMPLES = 200
_MOST_SERVERS = 8
# Least speedup over one device that is worth several: two predictions may each be off by 15 %.
_LEAST_SPEEDUP = 1.3
# A larger number of workers has to bring so much more for each of them: half of its share.
_LEAST_SHARE = 0.5
# A setting that changes the trained model (staleness, averaging, lossy codecs) has to be so much faster than others.
_LEAST_GAIN = 2.0
# Most machine-hours for an example, over those of one device.
MOST_COST = 2.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way of training.

    Attributes:
      strategy: name of the strategy; "" for one device.
      workers: number of workers.
      label: the policies in words, for tables.
      code: the policies as a user writes them.
      policy: builds the policy; it keeps state, so each simulation needs a new one. None without a policy.
      servers: parameter servers; 0 without.
      codec: cost of the codec of `Compression`.
      is_exact: True if an update is what one device would compute from the global batch: no staleness, no codec.
    """

    strategy: str = ""
    workers: int = 1
    label: str = ""
    code: str = ""
    policy: Callable[[], Policy] | None = None
    servers: int = 0
    codec: CodecModel | None = None
    is_exact: bool = True

    def __str__(self) -> str:
        """The strategy as a user writes it."""
        return f"tfdist.{self.strategy}({f'policies=[tfdist.{self.code}]' if self.code else ''})"


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting, with what is expected of it.

    Attributes:
      setting: the setting.
      examples_per_sec: examples that enter updates.
      updates_per_sec: updates.
      efficiency: examples per second / (workers * those of one device).
      staleness: mean staleness of the applied gradients.
      cost: machine-seconds of an example over those of one device.
      limit: what limits the throughput, in words.
    """

    setting: Setting
    examples_per_sec: float
    updates_per_sec: float
    efficiency: float = 1.0
    staleness: float = 0.0
    cost: float = 1.0
    limit: str = "computing: one device computes all the time"

    @property
    def machines(self) -> float:
        """Machines that it runs on: cost / time."""
        return self.cost * self.efficiency * self.setting.workers

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON data."""
        own = self.setting
        given = {"setting": str(own), "strategy": own.strategy or "one device", "policies": own.code}
        given |= {"label": own.label, "workers": own.workers, "servers": own.servers}
        return {**vars(self), **given}


# Labels, codecs, and costs: bytes sent / bytes, and speeds of one core in bytes of float32
# (benchmarks/results/codecs.json). A threshold's ratio is that of a density of 0.25 %.
_HALF = "bfloat16", 'HalfPrecision("bfloat16")', CodecModel(0.5, 5e9, 5e9, True)
_HALF_ON_SERVERS = (*_HALF[:2], dataclasses.replace(_HALF[2], variables_ratio=0.5))
_THRESHOLD = "threshold", "Threshold()", CodecModel(0.001, 2e9, 4e9, False)


def settings(workers: int, samples: Sequence[float], has_dense: bool) -> Iterator[Setting]:
    """Yields the settings for a number of workers.

    Args:
      workers: number of workers, at least 2.
      samples: seconds of single steps, from which the spares follow.
      has_dense: whether there are dense gradients to compress.
    """
    each = prediction.quantiles(samples, _MOST_SAMPLES)
    spares, _ = backup_workers.best_spares([each] * workers, workers, workers // 2)
    # One parameter server, and one for four workers.
    servers = max(1, min(_MOST_SERVERS, workers // 4))
    multi = functools.partial(Setting, MULTI_WORKER, workers)
    served = functools.partial(Setting, PARAMETER_SERVER, workers)

    def backed(build: Callable[..., Setting], count: int, **given: int) -> Setting:
        label = f"{count} spare{'s' * (count > 1)}" if count else "synchronous"
        return build(label, f"BackupWorkers(spares={count})", functools.partial(BackupWorkers, count), **given)

    def encoded(build: Callable[..., Setting], label: str, codec: str, cost: CodecModel, **given: int) -> Setting:
        # The simulator asks for the cost alone; codecs need TensorFlow.
        policy = functools.partial(Compression, "auto")
        code = f"Compression(tfdist.compression.{codec})"
        return build(label, code, policy, codec=cost, is_exact=False, **given)

    yield multi("synchronous")
    if spares:
        yield backed(multi, spares)
    policy = functools.partial(ParameterAveraging, every_steps=_EVERY_STEPS)
    yield multi("averaging", f"ParameterAveraging(every_steps={_EVERY_STEPS})", policy, is_exact=False)
    if has_dense:
        yield from (encoded(multi, *codec) for codec in (_HALF, _THRESHOLD))
    for count in sorted({1, servers}):
        yield served("asynchronous", servers=count, is_exact=False)
    for count in sorted({0, spares}):
        yield backed(served, count, servers=servers)
    if has_dense:
        yield encoded(served, *_HALF_ON_SERVERS, servers=servers)


def rows(
    profile: Profile, network: Network, workers: Sequence[int], workers_per_machine: int = 1, global_batch: int = 0
) -> list[Row]:
    """Predicts one device, and all settings for each number of workers, in the steady state.

    Args:
      profile: of one device.
      network: between the machines.
      workers: numbers of workers.
      workers_per_machine: workers that share a machine's link and its cores.
      global_batch: examples of an update; 0 keeps the profile's batch on each worker.
    """
    alone = profile.batch_size / profile.step_secs[profile.batch_size]
    found = [Row(Setting(), alone, alone / profile.batch_size)]
    for count in sorted(set(workers) - {1}):
        size = max(1, global_batch // count) if global_batch else profile.batch_size
        here = min(count, workers_per_machine)
        for setting in settings(count, profile.samples, profile.dense_bytes > 0):
            result = prediction.simulate(
                profile,
                network,
                setting.strategy,
                [setting.policy()] if setting.policy else [],
                count,
                servers=setting.servers or 1,
                codec=setting.codec,
                workers_per_machine=here,
                batch_size=size,
            )
            speed, updates = prediction.steady(result)
            machines = 1 if network.is_one_machine else math.ceil(count / here) + setting.servers
            efficiency, cost = speed / (count * alone), machines * alone / speed
            limit, slower = result.limit, prediction.slowdown(profile, here)
            if slower - 1 > (1 / efficiency - 1) / 2:
                limit = f"shared cores: {here} workers on {profile.cores} cores take {slower:.1f} times as long"
            found.append(Row(setting, speed, updates, efficiency, result.mean_staleness, cost, limit))
    return found


def recommended(found: Sequence[Row], profile: Profile, most_cost: float = MOST_COST) -> Row:
    """Returns the row to recommend: `found[0]`, one device, unless several workers are clearly worth it.

    The best settings of each number of workers are compared. The largest number is taken whose additional workers still
    bring half of their share. Settings that train as one device does (no staleness, averaging or lossy codec) are
    preferred, unless another one is much faster.

    Args:
      found: the rows, one device first.
      profile: its noise scale says how much the examples of large batches teach.
      most_cost: machine-hours of an example over those of one device, at most.
    """
    speed = functools.partial(_useful, profile)
    single = best = found[0]
    # If no exact update gains anything, the model is too small for a network. Stale or averaged updates only hide that.
    allowed = [row for row in found[1:] if row.cost <= most_cost]
    if not any(row.setting.is_exact and speed(row) >= _LEAST_SPEEDUP * speed(single) for row in allowed):
        return single
    for workers in sorted({row.setting.workers for row in allowed}):
        row = _best([row for row in allowed if row.setting.workers == workers], profile)
        if speed(row) < _LEAST_SPEEDUP * speed(single):
            continue
        # Against one device any clear gain is worth it; against several each further worker has to bring its part.
        needed = _LEAST_SHARE * speed(single) * (workers - best.setting.workers)
        if best is single or speed(row) - speed(best) >= needed:
            best = row
    return best


def _useful(profile: Profile, row: Row) -> float:
    """Returns examples per second as far as they teach; those of one device count whole.

    Batches of B examples need 1 + B / B_noise times as many examples to a loss as the smallest ones (McCandlish et al.
    2018, arXiv 1812.06162, equation 2.12).
    """
    noise = profile.noise_scale
    if noise is None:
        return row.examples_per_sec
    batch = max(profile.batch_size, row.examples_per_sec / row.updates_per_sec)
    return row.examples_per_sec * (noise.value + profile.batch_size) / (noise.value + batch)


def _best(found: Sequence[Row], profile: Profile) -> Row:
    """Returns the fastest row of those that train alike, or of all, if it is much faster."""

    def speed(row: Row) -> float:
        # Codecs have to gain something.
        return _useful(profile, row) * (0.9 if row.setting.codec else 1.0)

    fastest = max(found, key=speed)
    exact = max((row for row in found if row.setting.is_exact), key=speed, default=fastest)
    return fastest if speed(fastest) > _LEAST_GAIN * speed(exact) else exact


def in_words(found: Sequence[Row], chosen: Row, profile: Profile, most_cost: float = MOST_COST) -> list[str]:
    """Returns the recommendation in one short sentence, and the reasons, a line each."""
    single, own = found[0], chosen.setting
    if chosen is single:
        return _alone(found, profile, most_cost)
    servers = f" and {own.servers} parameter server{'s' * (own.servers > 1)}" if own.servers else ""
    gain = chosen.examples_per_sec / single.examples_per_sec
    lines = [
        f"use {own.workers} workers{servers}: {gain:.1f} times as fast as one device",
        f"write {own}",
        f"{chosen.efficiency:.0%} efficient, {chosen.cost:.1f} times the machine-hours of an example: {chosen.limit}",
    ]
    if not own.is_exact:
        lines.append(_caution(chosen))
    more = [row for row in found[1:] if row.setting.workers > own.workers and row.setting.is_exact]
    if more:
        best = max(more, key=lambda row: row.examples_per_sec)
        ratio = best.examples_per_sec / chosen.examples_per_sec
        lines.append(
            f"{best.setting.workers} workers would be {ratio:.1f} times as fast as {own.workers}: {best.limit}"
        )
    return lines


def _alone(found: Sequence[Row], profile: Profile, most_cost: float) -> list[str]:
    if len(found) == 1:
        return ["one device was asked about; give --workers=1,2,4,8 to compare"]
    single = found[0].examples_per_sec
    best = max((row for row in found[1:] if row.setting.is_exact), key=functools.partial(_useful, profile))
    ratio, few = best.examples_per_sec / single, best.setting.workers
    if ratio <= 1:
        lines = [f"do not distribute: one device is faster; {few} workers make {ratio:.2f} times as much"]
    else:
        lines = [f"do not distribute: {few} workers make {ratio:.2f} times as much as one device"]
        lines.append(f"an example would cost {best.cost:.1f} times as many machine-hours")
    lines.append(f"the best that trains alike is {best.setting}: {best.limit}")
    if _useful(profile, best) >= _LEAST_SPEEDUP * single and best.cost > most_cost:
        lines.append(f"--any_cost recommends settings of more than {most_cost:g} times the cost, too")
    other = max(found[1:], key=lambda row: row.examples_per_sec)
    gain = other.examples_per_sec / single
    if not other.setting.is_exact and gain > _LEAST_SPEEDUP:
        name = other.setting.code or "asynchronous updates"
        lines.append(
            f"{name} on {other.setting.workers} workers would make {gain:.1f} times as many examples, but changes what "
            "is learned from each"
        )
    return lines


def _caution(row: Row) -> str:
    if row.setting.codec:
        return "Compression changes what is learned in a step: compare the loss with that of one device"
    if row.setting.strategy == PARAMETER_SERVER:
        old = f"Gradients are {row.staleness:.1f} updates old on average"
        return f"{old}: compare the loss, and lower the learning rate"
    return "Workers train apart between averages: compare the loss with that of one device"
