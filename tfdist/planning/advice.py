# SPDX-License-Identifier: Apache-2.0
"""All candidates with their predictions, times and costs, and one recommendation in words."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.planning import candidates, prediction
from tfdist.planning.candidates import PARAMETER_SERVER, Candidate
from tfdist.planning.prediction import Network, Prediction
from tfdist.planning.profile import NoiseScale, Profile

# Less than this many times the speed of one device is not worth several machines.
_LEAST_SPEEDUP = 1.2
# A larger number of workers has to bring so much more for each of them: half of its share.
_LEAST_SHARE = 0.5
# A setting that changes the trained model (staleness, averaging, lossy codecs) has to be so much faster than others.
_LEAST_GAIN = 2.0
# By the model of statistical efficiency, more workers have to reach a loss so many times as fast.
_LEAST_MORE = 1.1


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate, or one device if `candidate` is None, with what is expected of it.

    Attributes:
      candidate: None for one device.
      prediction: its throughput.
      limit: what limits it.
      secs: time for the wanted number of examples; None if no number was given.
      cost: of that time; None without a price.
      speedup_to_loss: a model's estimate of how many times as fast as one device a loss is reached.
    """

    candidate: Candidate | None
    prediction: Prediction
    limit: Limit
    secs: Estimate | None = None
    cost: Estimate | None = None
    speedup_to_loss: Estimate | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.candidate.workers if self.candidate else 1

    @property
    def machines(self) -> int:
        """Workers and parameter servers together."""
        return self.workers + (self.candidate.servers if self.candidate else 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON data."""
        own = self.candidate
        found: dict[str, Any] = {
            "strategy": own.strategy if own else "one device",
            "policies": own.code if own else "",
            "workers": self.workers,
            "servers": own.servers if own else 0,
            "spares": own.spares if own else 0,
            **dataclasses.asdict(self.prediction),
            "limit": self.limit.words,
        }
        for name in ("secs", "cost", "speedup_to_loss"):
            estimate = getattr(self, name)
            found[name] = None if estimate is None else dataclasses.asdict(estimate)
        return found


@dataclasses.dataclass(frozen=True)
class Question:
    """Question of the user.

    Attributes:
      workers: numbers of workers to compare.
      examples: how many examples to train on; 0 if unknown.
      price_per_hour: of one machine; 0 if unknown.
      workers_per_machine: workers that share a machine, its link and its cores.
      global_batch: examples of an update on all workers together; 0 to keep the profile's batch on each worker.
    """

    workers: Sequence[int]
    examples: float = 0.0
    price_per_hour: float = 0.0
    workers_per_machine: int = 1
    global_batch: int = 0


def rows(profile: Profile, network: Network, question: Question) -> list[Row]:
    """Predicts one device, and all candidates for each number of workers."""
    single = prediction.one_device(profile)
    alone = Estimate(single.examples_per_sec, single.low, single.high)
    found = [_row(None, single, Limit("computing", single.limit), profile, question, alone)]
    for workers in sorted(set(question.workers) - {1}):
        size = max(1, question.global_batch // workers) if question.global_batch else profile.batch_size
        for candidate in candidates.all_for(workers, profile.samples, profile.dense_bytes > 0):
            predicted = prediction.predict(profile, network, candidate, question.workers_per_machine, size)
            limit = limit_of(profile, network, candidate, predicted, question.workers_per_machine)
            found.append(_row(candidate, predicted, limit, profile, question, alone))
    return found


def _row(
    candidate: Candidate | None,
    predicted: Prediction,
    limit: Limit,
    profile: Profile,
    question: Question,
    alone: Estimate,
) -> Row:
    row = Row(candidate, predicted, limit)
    speed = Estimate(predicted.examples_per_sec, predicted.low, predicted.high)
    secs = cost = None
    if question.examples:
        secs = Estimate(*(question.examples / each for each in (speed.value, speed.high, speed.low)))
        machines = math.ceil(row.workers / question.workers_per_machine) + row.machines - row.workers
        price = question.price_per_hour / 3600 * machines
        cost = Estimate(secs.value * price, secs.low * price, secs.high * price) if question.price_per_hour else None
    return dataclasses.replace(row, secs=secs, cost=cost, speedup_to_loss=_to_a_loss(row, profile, speed, alone))


def _to_a_loss(row: Row, profile: Profile, speed: Estimate, alone: Estimate) -> Estimate | None:
    predicted = row.prediction
    batch = predicted.global_batch if row.candidate else profile.batch_size
    found = speedup_to_a_loss(profile, speed, alone, batch, predicted.staleness)
    if found is None or row.candidate is None or "ParameterAveraging" not in row.candidate.code:
        return found
    # Between averages workers train apart: at worst as in one step with all these examples, at best as in many steps.
    best = speedup_to_a_loss(profile, speed, alone, batch / candidates.EVERY_STEPS, 0.0) or found
    return Estimate(math.sqrt(found.value * best.value), found.low, best.high)


def recommended(found: Sequence[Row]) -> Row:
    """Returns the row to recommend: `found[0]`, one device, unless several workers are clearly worth it.

    The best candidates of each number of workers are compared. The largest number is taken whose additional workers
    still bring half of their share. Candidates that train as one device does (no staleness, averaging or lossy codec)
    are preferred, unless another one is much faster.
    """
    single = found[0]
    speed = single.prediction.examples_per_sec
    best = single
    # If no synchronous update gains anything, the model is too small for a network. Stale or averaged updates only hide
    # that: their examples teach less.
    if not any(_is_exact(row) and row.prediction.low >= _LEAST_SPEEDUP * speed for row in found[1:]):
        return single
    for workers in sorted({row.workers for row in found[1:]}):
        row = _best([row for row in found[1:] if row.workers == workers])
        if row.prediction.low < _LEAST_SPEEDUP * speed:
            continue
        gained = row.prediction.examples_per_sec - best.prediction.examples_per_sec
        # Against one device any clear gain may be worth it; against several each further worker has to bring its part.
        needed = (_LEAST_SPEEDUP - 1) * speed if best is single else _LEAST_SHARE * speed * (row.workers - best.workers)
        if gained >= needed and _is_worth(row, best):
            best = row
    return best


def _is_worth(row: Row, best: Row) -> bool:
    """False if more workers make a loss come later, by the model of statistical efficiency."""
    if row.speedup_to_loss is None or best.speedup_to_loss is None:
        return True
    return _cautious(row) >= (_LEAST_SPEEDUP if best.candidate is None else _LEAST_MORE) * _cautious(best)


def _cautious(row: Row) -> float:
    """Speed to a loss between the middle and the lower bound: what the model can't tell is no reason to distribute."""
    estimate = row.speedup_to_loss
    return math.sqrt(estimate.value * estimate.low) if estimate else 0.0


def _simplicity(row: Row) -> float:
    """A factor below 1 for codecs: they have to gain something."""
    return 0.9 if row.candidate and row.candidate.codec else 1.0


def _best(found: Sequence[Row]) -> Row:
    if all(row.speedup_to_loss for row in found):
        # Of stale gradients and averages the model often can't tell whether they help at all.
        sure = [row for row in found if _is_exact(row) or (row.speedup_to_loss and row.speedup_to_loss.low >= 1.0)]
        return max(sure, key=lambda row: _simplicity(row) * _cautious(row))
    fastest = max(found, key=lambda row: _simplicity(row) * row.prediction.examples_per_sec)
    exact = [row for row in found if _is_exact(row)]
    fastest_exact = max(exact, key=lambda row: row.prediction.examples_per_sec, default=fastest)
    gain = fastest.prediction.examples_per_sec / fastest_exact.prediction.examples_per_sec
    return fastest if gain > _LEAST_GAIN else fastest_exact


def in_words(found: Sequence[Row], chosen: Row, profile: Profile) -> list[str]:
    """Returns the recommendation in one short sentence, and the reasons, a line each."""
    if chosen.candidate is None:
        return _alone(found)
    own, predicted = chosen.candidate, chosen.prediction
    gain, low, high = (
        each / found[0].prediction.examples_per_sec
        for each in (predicted.examples_per_sec, predicted.low, predicted.high)
    )
    servers = f" and {own.servers} parameter server{'s' * (own.servers > 1)}" if own.servers else ""
    digits = 1 if gain < 10 else 0
    fast = f"{gain:.{digits}f} times as fast as one device ({low:.{digits}f} to {high:.{digits}f})"
    lines = [
        f"use {own.workers} workers{servers}: {fast}",
        f"write {_code(own)}",
        f"{predicted.efficiency:.0%} efficient: {chosen.limit.words}",
    ]
    if not own.is_exact:
        lines.append(_caution(own, predicted))
    counts = {row.workers for row in found[1:] if row.workers > own.workers}
    if counts:
        # With the candidate that would be recommended for them.
        more = [_best([row for row in found[1:] if row.workers == count]) for count in counts]
        best = max(more, key=lambda row: row.prediction.examples_per_sec)
        ratio = best.prediction.examples_per_sec / predicted.examples_per_sec
        lines.append(f"{best.workers} workers would be {ratio:.1f} times as fast as {own.workers}: {best.limit.words}")
    if chosen.secs:
        cost = chosen.cost
        price = f", and cost {number_text(cost.low)} to {number_text(cost.high)}" if cost else ""
        lines.append(f"the examples take {duration_text(chosen.secs.low)} to {duration_text(chosen.secs.high)}{price}")
    if chosen.speedup_to_loss and chosen.speedup_to_loss.says_something:
        estimate = chosen.speedup_to_loss
        lines.append(
            f"to the same loss: {estimate.value:.1f} times as fast ({estimate.low:.1f} to {estimate.high:.1f}), by a "
            "model of the gradient noise scale"
        )
    return lines


def _alone(found: Sequence[Row]) -> list[str]:
    if len(found) == 1:
        return ["one device was asked about; give --workers=1,2,4,8 to compare"]
    best = max((row for row in found[1:] if _is_exact(row)), key=lambda row: row.prediction.examples_per_sec)
    ratio = best.prediction.examples_per_sec / found[0].prediction.examples_per_sec
    if ratio <= 1:
        lines = [f"do not distribute: one device is faster; {best.workers} workers make {ratio:.2f} times as much"]
    else:
        lines = [f"do not distribute: {best.workers} workers make only {ratio:.2f} times as much as one device"]
    if best.candidate:
        lines.append(f"the best that trains alike is {_code(best.candidate)}")
        lines.append(f"its limit: {best.limit.words}")
    other = max(found[1:], key=lambda row: row.prediction.examples_per_sec)
    gain = other.prediction.examples_per_sec / found[0].prediction.examples_per_sec
    if other.candidate and not _is_exact(other) and gain > _LEAST_SPEEDUP:
        name = other.candidate.code or "asynchronous updates"
        lines.append(
            f"{name} on {other.workers} workers would make {gain:.1f} times as many examples, but changes what is "
            "learned from each"
        )
    return lines


def _code(own: Candidate) -> str:
    """Returns the strategy as a user writes it."""
    return f"tfdist.{own.strategy}" + (f"(policies=[{_public(own.code)}])" if own.code else "()")


def _is_exact(row: Row) -> bool:
    return row.candidate is not None and row.candidate.is_exact


def _public(code: str) -> str:
    return code if code.startswith("tfdist.") else f"tfdist.{code}"


def _caution(own: Candidate, predicted: Prediction) -> str:
    if own.codec:
        return "Compression changes what is learned in a step: compare the loss with that of one device"
    if own.strategy == PARAMETER_SERVER:
        old = f"Gradients are {predicted.staleness:.1f} updates old on average"
        return f"{old}: compare the loss, and lower the learning rate"
    return "Workers train apart between averages: compare the loss with that of one device"


# Bottleneck of a candidate, such as "the server's link is full from 6 workers on".


_MOSTLY = 0.5


def gradient_bytes(profile: Profile) -> float:
    """Bytes that a step sends: dense gradients, and rows of tables."""
    return profile.dense_bytes + sum(table.rows_per_step * table.row_bytes for table in profile.tables)


def full_from(profile: Profile, network: Network, candidate: Candidate) -> int:
    """Returns the number of workers from which on the links of the parameter servers are full.

    A worker's cycle without others is computing, and two transfers over its own link. The servers' links are full once
    all workers together fetch, or send, as many bytes in a cycle as the servers can carry in it.
    """
    size = gradient_bytes(profile) * (candidate.codec.ratio if candidate.codec else 1.0)
    if not size:
        return 0
    link = network.model().bandwidth
    cycle = statistics.fmean(profile.samples) + 2 * size / link
    return max(1, math.ceil(cycle / (size / (link * max(1, candidate.servers)))))


class Limit(NamedTuple):
    """Bottleneck of a candidate: a few words for tables, and a sentence."""

    short: str
    words: str


def limit_of(
    profile: Profile, network: Network, candidate: Candidate, predicted: Prediction, workers_per_machine: int = 1
) -> Limit:
    """Returns what limits a candidate most."""
    here = min(candidate.workers, workers_per_machine)
    slower = prediction.slowdown(profile, here)
    if predicted.efficiency > 1:
        return Limit(
            "computing", "above 100 %, because one device waits for its own slow steps, and spares leave them out"
        )
    if predicted.efficiency >= 0.9:
        return Limit("computing", "the devices compute most of the time")
    # Parts of the time beyond one device's step.
    of_cores = slower - 1
    of_slowest = slower * max(0.0, expected_slowest(profile.samples, candidate) / statistics.fmean(profile.alone) - 1)
    of_sums = 1 / predicted.efficiency - 1 - of_cores - of_slowest
    if of_cores >= max(of_slowest, of_sums):
        words = f"{here} workers share the {profile.cores} cores of a machine: steps take {slower:.1f} times as long"
        return Limit("shared cores", words)
    if candidate.strategy == PARAMETER_SERVER:
        return _of_servers(profile, network, candidate, predicted)
    if of_slowest > of_sums:
        return Limit("slowest worker", f"waiting for the slowest of {candidate.workers} workers")
    name = "TensorFlow's transport" if _is_software(network) else "the network"
    share = f"{of_sums * predicted.efficiency:.0%}"
    return Limit(f"sums, {share}", f"{name}: sums take {share} of the time")


def _of_servers(profile: Profile, network: Network, candidate: Candidate, predicted: Prediction) -> Limit:
    workers = full_from(profile, network, candidate)
    whose = "the server's link is" if candidate.servers == 1 else f"the links of {candidate.servers} servers are"
    suffix = " (TensorFlow's transport, not the network)" if _is_software(network) else ""
    if workers and candidate.workers >= workers:
        return Limit("servers' links", f"{whose} full from {workers} workers on{suffix}")
    if predicted.efficiency < _MOSTLY:
        share = f"{1 - predicted.efficiency:.0%}"
        return Limit(f"transfers, {share}", f"sending and fetching variables takes {share} of the time{suffix}")
    later = f"; {whose} full from {workers} workers on" if workers else ""
    return Limit("transfers", f"workers wait for variables and gradients to be sent{later}")


def _is_software(network: Network) -> bool:
    return network.model().bandwidth < network.bandwidth / 2


def expected_slowest(samples: tuple[float, ...], candidate: Candidate) -> float:
    """Expected seconds until the last worker whose gradient counts has arrived, in one update."""
    ordered = sorted(samples)
    share = (candidate.workers - candidate.spares) / (candidate.workers + 1)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# A model of statistical efficiency: how many more examples, or updates, large batches and stale gradients need.
#
# It is a model, apart from the throughput that is measured and simulated, and every output says so.
#
# Large batches (McCandlish et al. 2018, arXiv 1812.06162, equations 2.11 and 2.12): with the critical batch size
# B_crit, training with batches of B examples to a given loss needs
#
#     S / S_min = 1 + B_crit / B   updates,   E / E_min = 1 + B / B_crit   examples.
#
# B_crit is estimated by the gradient noise scale at the weights that were profiled. It grows during training, by an
# order of magnitude or more, so an estimate at the start is cautious about large batches.
#
# Stale gradients: take plain SGD at a step size a and curvature h, with gradients that are t updates old. It is stable
# for a h < 2 sin(pi / (2 (2 t + 1))) (Levin and May 1976, A note on difference-delay equations). So where stability
# limits the step size, staleness t needs between 1 and 1 / sin(pi / (2 (2 t + 1))) times as many updates. The upper
# bound is about (2 t + 1) 2 / pi; the middle is the geometric mean of both.


# An interval of at least this ratio says nothing.
_MOST_SPREAD = 10.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with the bounds of its interval."""

    value: float
    low: float
    high: float

    @property
    def says_something(self) -> bool:
        """False if the interval is so wide that the number tells nothing."""
        return self.low > 0 and self.high < _MOST_SPREAD * self.low

    def __mul__(self, other: Estimate) -> Estimate:
        return Estimate(self.value * other.value, self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Estimate) -> Estimate:
        return Estimate(self.value / other.value, self.low / other.high, self.high / other.low)


def examples_factor(noise: NoiseScale, batch: float, reference: float) -> Estimate:
    """Ratio of examples to the same loss: those with batches of `batch`, over those with batches of `reference`."""

    def factor(critical: float) -> float:
        if critical == math.inf:
            return 1.0
        return (critical + batch) / (critical + reference) if critical + reference else batch / reference

    # A larger critical batch size makes large batches cost less.
    bounds = sorted((factor(noise.low), factor(noise.high)))
    return Estimate(factor(noise.value), *bounds)


def staleness_factor(staleness: float) -> Estimate:
    """Ratio of updates to the same loss: those from gradients of this mean staleness, over those from fresh ones."""
    most = 1 / math.sin(math.pi / (2 * (2 * staleness + 1)))
    return Estimate(math.sqrt(most), 1.0, most)


def speedup_to_a_loss(
    profile: Profile, speed: Estimate, alone: Estimate, batch: float, staleness: float
) -> Estimate | None:
    """Speedup over one device until the same loss is reached; None if nothing is known of the noise scale.

    Args:
      profile: of one device, with its batch size.
      speed: examples per second.
      alone: those of one device.
      batch: examples of an update.
      staleness: mean staleness of its gradients.
    """
    if profile.noise_scale is None or not profile.noise_scale.is_known:
        return None
    needed = examples_factor(profile.noise_scale, max(batch, profile.batch_size), profile.batch_size)
    return speed / alone / (needed * staleness_factor(staleness))


# Numbers and times as text, for tables and recommendations.


def number_text(value: float) -> str:
    """Returns a number with three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration_text(secs: float) -> str:
    """Returns a time such as 90 s, 12 min or 3.5 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * size:
            return f"{secs / size:.3g} {unit}"
    return f"{secs:.3g} s"
