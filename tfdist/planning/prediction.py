# SPDX-License-Identifier: Apache-2.0
"""Predicted throughput of a profile on several workers: the simulator with the profile's measured step times."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence

from tfdist.doctor import measure as doctor_measure
from tfdist.planning import simulation
from tfdist.planning.candidates import MULTI_WORKER, PARAMETER_SERVER, Candidate
from tfdist.planning.profile import Profile
from tfdist.planning.simulation import NetworkModel, models
from tfdist.policies.base import Aggregation, Policy
from tfdist.policies.parameter_averaging import ParameterAveraging

# Network of a prediction: "local", a bandwidth such as 10Gbit, or a file of `tfdist doctor --measure`.


# TensorFlow's own part of each message on CPUs, measured with TensorFlow 2.21 between two processes of one machine. A
# sum of 4 floats takes 2 ms, two messages. A sum of a million floats takes 14 ms: gRPC moves about 0.35 GB/s.
SOFTWARE_LATENCY_SECS = 1e-3
SOFTWARE_BANDWIDTH = 0.35e9
# Links of processes on one machine: the loopback interface, of which the software is the limit.
LOCAL = "local"
_LOOPBACK_BANDWIDTH, _LOOPBACK_LATENCY_SECS = 4e9, 20e-6
# Uncertainty of a bandwidth that was not measured, as a share; measured ones have their own spread.
_UNMEASURED = 0.15


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between machines.

    Attributes:
      bandwidth: bytes per second of a machine's link, in each direction.
      latency_secs: of one message, without software.
      spread: standard deviation of the bandwidth as a share of it.
      software_bandwidth: bytes per second that one process can send; infinite for accelerators that send by themselves.
      text: how the network was given.
      is_one_machine: whether all workers run on one machine, and share its cores.
    """

    bandwidth: float
    latency_secs: float
    spread: float = _UNMEASURED
    software_bandwidth: float = SOFTWARE_BANDWIDTH
    text: str = ""
    is_one_machine: bool = False

    def model(self) -> NetworkModel:
        """Returns what the simulator takes: each byte passes the software, and then the link."""
        # Accelerators that send by themselves need no gRPC.
        software_secs = SOFTWARE_LATENCY_SECS if self.software_bandwidth < math.inf else 0.0
        return NetworkModel(
            bandwidth=self.effective,
            latency_secs=self.latency_secs + software_secs,
            within_bandwidth=self.software_bandwidth,
            within_latency_secs=software_secs,
            server_bandwidth=self.effective,
            # TCP shares a full link among its connections: measured in experiments/scaling, machine.py.
            queueing="fair",
        )

    @property
    def effective(self) -> float:
        """Bytes per second through the software and the link, one after the other."""
        return 1 / (1 / self.bandwidth + 1 / self.software_bandwidth)


def from_flag(text: str, latency: str | None, has_accelerators: bool) -> Network:
    """Builds a network from the flags --network and --latency.

    Args:
      text: "local", a bandwidth such as 10Gbit, or a file of `tfdist doctor --measure`.
      latency: such as 50us; None for that of the file, or 50 us.
      has_accelerators: whether devices send by themselves (NCCL), so that CPU software does not limit a sum.

    Raises:
      ValueError: the text is neither, or a number is invalid.
    """
    software = math.inf if has_accelerators else SOFTWARE_BANDWIDTH
    if text == LOCAL:
        latency_secs = models.secs(latency, "--latency") if latency else _LOOPBACK_LATENCY_SECS
        shown = "all workers on this machine"
        return Network(_LOOPBACK_BANDWIDTH, latency_secs, _UNMEASURED, software, shown, is_one_machine=True)
    path = pathlib.Path(text)
    if path.suffix == ".json" or path.is_file():
        return _from_file(path, latency, software)
    bandwidth = models.bytes_per_sec(text if not _is_number(text) else float(text), "--network")
    latency_secs = models.secs(latency or "50us", "--latency")
    return Network(bandwidth, latency_secs, _UNMEASURED, software, f"{text}, {1e6 * latency_secs:.0f} us")


def _from_file(path: pathlib.Path, latency: str | None, software: float) -> Network:
    try:
        links, is_one_machine = doctor_measure.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--network: can't read {path} ({error}); write it with tfdist doctor --measure --json={path}, or give a "
            "bandwidth such as 10Gbit"
        ) from None
    speeds = [link.bytes_per_sec for link in links]
    # A synchronous step waits for the slowest link, so its speed counts; the spread says how sure it is.
    bandwidth, middle = min(speeds), statistics.median(speeds)
    latency_secs = (
        models.secs(latency, "--latency") if latency else statistics.median(each.latency_secs for each in links)
    )
    spread = min(0.5, max(0.05, (middle - bandwidth) / middle))
    text = f"{len(links)} measured links, the slowest {bandwidth / 0.125e9:.3g} Gbit/s, {1e6 * latency_secs:.0f} us"
    text += ", of one machine" if is_one_machine else ""
    return Network(bandwidth, latency_secs, spread, software, text, is_one_machine)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Updates that a prediction simulates: of one gradient each, and of one from each worker.
_GRADIENTS, _UPDATES = 300, 16
# Share of the updates at the beginning that don't count: all workers start at the same time there.
_BEGINNING = 0.2
# Two processes of one program differ by so much for as long as they live, and a model of a cluster by as much again.
_LEAST_SPREAD = 0.03
# Quantile of the normal distribution for an interval of 90 %.
_QUANTILE = 1.645
_MOST_SAMPLES = 500
# Cost of an update in software, measured on small models (benchmarks/README.md). The chief of parameter servers hands
# out some 400 steps per second, all workers together. A step of several workers takes some milliseconds.
_UPDATE_SECS = {PARAMETER_SERVER: 2.5e-3, MULTI_WORKER: 2e-3}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Expected throughput and cost of a candidate.

    Attributes:
      examples_per_sec: examples that enter updates.
      low: lower bound of the 90 % interval.
      high: upper bound of it.
      updates_per_sec: updates.
      efficiency: examples per second / (workers * those of one device).
      staleness: mean staleness of the applied gradients.
      global_batch: examples of one update.
      limit: what limits the throughput, in words.
    """

    examples_per_sec: float
    low: float
    high: float
    updates_per_sec: float
    efficiency: float
    staleness: float
    global_batch: float
    limit: str


def one_device(profile: Profile) -> Prediction:
    """Returns the throughput that was measured, with the interval of the samples."""
    samples = profile.alone
    speed = profile.batch_size / statistics.fmean(samples)
    factor = 1 + _QUANTILE * spread(samples)
    limit = "one device computes all the time"
    return Prediction(
        speed, speed / factor, speed * factor, speed / profile.batch_size, 1.0, 0.0, profile.batch_size, limit
    )


def slowdown(profile: Profile, workers_per_machine: int) -> float:
    """Returns how many times as long a step computes with other workers on its machine: their cores / its cores."""
    needed = workers_per_machine * profile.used_cores
    return max(1.0, needed / profile.cores) if profile.cores else 1.0


def spread(samples: Sequence[float]) -> float:
    """Standard deviation of a mean step time as a share of it, from the means of ten blocks of consecutive samples.

    Blocks, because a machine that was busy for a while makes all samples of that while longer.
    """
    count = min(10, len(samples))
    if count < 2:
        return 0.1
    size = len(samples) // count
    means = [statistics.fmean(samples[index * size : (index + 1) * size]) for index in range(count)]
    own = statistics.stdev(means) / statistics.fmean(means) / math.sqrt(count)
    return math.hypot(_LEAST_SPREAD, own)


def predict(
    profile: Profile,
    network: Network,
    candidate: Candidate,
    workers_per_machine: int = 1,
    batch_size: int | None = None,
) -> Prediction:
    """Predicts the throughput of a candidate, in the steady state.

    Args:
      profile: of one device.
      network: between the machines.
      candidate: strategy, policies and number of workers.
      workers_per_machine: workers that share a machine's link and its cores.
      batch_size: examples of a step of each worker; by default the profile's.
    """
    size = batch_size or profile.batch_size
    result = simulate(
        profile,
        network,
        candidate.strategy,
        candidate.policies(),
        candidate.workers,
        servers=candidate.servers or 1,
        codec=candidate.codec,
        workers_per_machine=workers_per_machine,
        batch_size=size,
    )
    speed, updates_per_sec = steady(result, size)
    # Computing is as uncertain as the samples, all else as the network.
    computing = min(1.0, result.computing_share)
    relative = math.hypot(computing * spread(profile.samples), (1 - computing) * network.spread, _LEAST_SPREAD)
    factor = 1 + _QUANTILE * relative
    # By the fastest device that was measured, against which the efficiency counts.
    alone = size / step_secs(profile, size) * statistics.fmean(profile.samples) / statistics.fmean(profile.alone)
    if not candidate.spares:
        # Only spares leave slow steps out; what else exceeds it is the draw of the simulated steps.
        speed, updates_per_sec = (
            each * min(1.0, candidate.workers * alone / speed) for each in (speed, updates_per_sec)
        )
    return Prediction(
        speed,
        speed / factor,
        speed * factor,
        updates_per_sec,
        speed / (candidate.workers * alone),
        result.mean_staleness,
        speed / updates_per_sec,
        result.limit,
    )


def simulate(
    profile: Profile,
    network: Network,
    strategy: str,
    policies: Sequence[Policy],
    workers: int,
    *,
    servers: int = 1,
    codec: simulation.CodecModel | None = None,
    workers_per_machine: int = 1,
    batch_size: int | None = None,
    update_secs: float | None = None,
    num_updates: int = 0,
    steps_per_epoch: int = 0,
) -> simulation.Result:
    """Simulates a strategy on workers like the profiled device; see `predict` and `simulation.simulate`."""
    size = batch_size or profile.batch_size
    workers_per_machine = min(workers, workers_per_machine)
    longer = step_secs(profile, size) / step_secs(profile, profile.batch_size) * slowdown(profile, workers_per_machine)
    steps = [sample * longer for sample in profile.samples]
    if len(steps) > _MOST_SAMPLES:
        ordered = sorted(steps)
        steps = [ordered[(2 * index + 1) * len(ordered) // (2 * _MOST_SAMPLES)] for index in range(_MOST_SAMPLES)]
    cluster = simulation.ClusterModel(
        workers=workers,
        workers_per_machine=workers_per_machine,
        servers=servers,
        compute=simulation.empirical(steps),
        network=network.model(),
    )
    rows = size / profile.batch_size
    tables = [simulation.SparseTable(table.rows_per_step * rows, table.row_bytes) for table in profile.tables]
    # An average is of whole tables, not of the rows that a step touches.
    is_averaged = any(isinstance(each, ParameterAveraging) for each in policies)
    model = simulation.ModelProfile(
        dense_bytes=profile.trainable_bytes if is_averaged else profile.dense_bytes,
        sparse_tables=() if is_averaged else tables,
        batch_size=size,
        optimizer_bytes=profile.optimizer_bytes,
        update_secs=_UPDATE_SECS[strategy] if update_secs is None else update_secs,
    )
    is_asynchronous = strategy == PARAMETER_SERVER and not any(isinstance(each, Aggregation) for each in policies)
    updates = num_updates or (max(_GRADIENTS, 8 * workers) if is_asynchronous else _UPDATES)
    return simulation.simulate(
        cluster,
        model,
        strategy=strategy,
        policies=policies,
        codec=codec,
        num_updates=updates,
        steps_per_epoch=steps_per_epoch,
    )


def steady(result: simulation.Result, batch_size: int) -> tuple[float, float]:
    """Returns examples and updates per second after the beginning of a simulation."""
    count = len(result.updates)
    first = int(_BEGINNING * count)
    records = result.gradients
    times = [0.0] * count
    for update, arrived in zip(records.update, records.arrived, strict=True):
        if update > 0:
            times[update - 1] = max(times[update - 1], arrived)
    secs = times[-1] - times[first]
    if count - first < 2 or secs <= 0:
        return result.examples_per_sec, result.updates_per_sec
    rate = (count - 1 - first) / secs
    return rate * result.examples_per_sec / result.updates_per_sec, rate


def step_secs(profile: Profile, batch_size: int) -> float:
    """Returns the mean seconds of a step with so many examples: measured, or on the line through the nearest sizes."""
    points = sorted((each.batch_size, statistics.fmean(each.secs)) for each in profile.steps)
    if batch_size == profile.batch_size or not points:
        return statistics.fmean(profile.samples) * batch_size / profile.batch_size
    if len(points) == 1:
        return points[0][1] * batch_size / points[0][0]
    if batch_size <= points[0][0]:
        return points[0][1]
    upper = next((index for index, (size, _) in enumerate(points) if size >= batch_size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(min(y0, y1), y0 + (y1 - y0) * (batch_size - x0) / (x1 - x0))
