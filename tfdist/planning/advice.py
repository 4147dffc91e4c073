# SPDX-License-Identifier: Apache-2.0
"""Settings on several workers with their predictions from a profile, and one recommendation in words."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.planning import prediction
from tfdist.planning.prediction import Network
from tfdist.planning.profile import Profile
from tfdist.planning.simulation import CodecModel
from tfdist.planning.simulation.engines import MULTI_WORKER, PARAMETER_SERVER
from tfdist.policies import backup_workers
from tfdist.policies.backup_workers import BackupWorkers
from tfdist.policies.base import Policy
from tfdist.policies.compression import Compression
from tfdist.policies.parameter_averaging import ParameterAveraging

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
