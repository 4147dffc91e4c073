# SPDX-License-Identifier: Apache-2.0
"""Predicted throughput of a profile on several workers: the simulator with the profile's measured step times."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence

from tfdist.doctor import measure as doctor_measure
from tfdist.launchers.requests import read_file
from tfdist.planning import simulation
from tfdist.planning.profile import Profile
from tfdist.planning.simulation import NetworkModel, models
from tfdist.planning.simulation.engines import MULTI_WORKER, PARAMETER_SERVER
from tfdist.policies.base import Aggregation, Policy
from tfdist.policies.parameter_averaging import ParameterAveraging

# TensorFlow's own part of each message on CPUs, measured with TensorFlow 2.21 between two processes of one machine. A
# sum of 4 floats takes 2 ms, two messages. A sum of a million floats takes 14 ms: gRPC moves about 0.35 GB/s.
SOFTWARE_LATENCY_SECS = 1e-3
SOFTWARE_BANDWIDTH = 0.35e9
# Links of processes on one machine: the loopback interface, of which the software is the limit.
LOCAL = "local"
_LOOPBACK_BANDWIDTH, _LOOPBACK_LATENCY_SECS = 4e9, 20e-6


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between machines.

    Attributes:
      bandwidth: bytes per second of a machine's link, in each direction.
      latency_secs: of one message, without software.
      software_bandwidth: bytes per second that one process can send; infinite for accelerators that send by themselves.
      text: how the network was given.
      is_one_machine: whether all workers run on one machine, and share its cores.
    """

    bandwidth: float
    latency_secs: float
    software_bandwidth: float
    text: str
    is_one_machine: bool

    def model(self) -> NetworkModel:
        """Returns what the simulator takes: each byte passes the software, and then the link."""
        # Accelerators that send by themselves need no gRPC.
        software_secs = SOFTWARE_LATENCY_SECS if self.software_bandwidth < math.inf else 0.0
        return NetworkModel(
            bandwidth=1 / (1 / self.bandwidth + 1 / self.software_bandwidth),
            latency_secs=self.latency_secs + software_secs,
            within_bandwidth=self.software_bandwidth,
            within_latency_secs=software_secs,
            # TCP shares a full link among its connections: measured in experiments/scaling, machine.py.
            queueing="fair",
        )


def from_flag(text: str, latency: str | None, has_accelerators: bool) -> Network:
    """Builds a network from the flags --network and --latency.

    Args:
      text: "local", a bandwidth such as 10Gbit, or a file of `tfdist doctor --measure`.
      latency: such as 50us; None for that of the file, or 50 us.
      has_accelerators: whether devices send by themselves (NCCL), so that CPU software does not limit a sum.

    Raises:
      ValueError: the text is neither, or a number is invalid.
    """
    path, is_one_machine = pathlib.Path(text), text == LOCAL
    if is_one_machine:
        bandwidth, usual, shown = _LOOPBACK_BANDWIDTH, _LOOPBACK_LATENCY_SECS, "local links"
    elif path.suffix == ".json" or path.is_file():
        remedy = f"write it with tfdist doctor --measure --json={path}, or give a bandwidth such as 10Gbit"
        links, is_one_machine = doctor_measure.from_json(read_file("--network", text, remedy), text)
        # A synchronous step waits for the slowest link, so its speed counts.
        bandwidth = min(link.bytes_per_sec for link in links)
        usual = statistics.median(each.latency_secs for each in links)
        shown = f"{len(links)} measured links, the slowest {bandwidth / 0.125e9:.3g} Gbit/s"
    else:
        bandwidth, usual, shown = models.bytes_per_sec(text, "--network"), 50e-6, text
    latency_secs = models.secs(latency or usual, "--latency")
    shown += f", {1e6 * latency_secs:.0f} us{', of one machine' * is_one_machine}"
    software = math.inf if has_accelerators else SOFTWARE_BANDWIDTH
    return Network(bandwidth, latency_secs, software, shown, is_one_machine)


# Updates that a simulation makes: of one gradient each, and of one from each worker.
_GRADIENTS, _UPDATES = 300, 16
# Share of the updates at the beginning that don't count: all workers start at the same time there.
_BEGINNING = 0.2
_MOST_SAMPLES = 500
# Cost of an update in software, measured on small models (benchmarks/README.md). The chief of parameter servers hands
# out some 400 steps per second, all workers together. A step of several workers takes some milliseconds.
_UPDATE_SECS = {PARAMETER_SERVER: 2.5e-3, MULTI_WORKER: 2e-3}


def quantiles(samples: Sequence[float], most: int) -> list[float]:
    """Returns the samples in order; of more than `most` as many evenly spaced quantiles."""
    ordered, count = sorted(samples), min(most, len(samples))
    return [ordered[(2 * index + 1) * len(ordered) // (2 * count)] for index in range(count)]


def slowdown(profile: Profile, workers_per_machine: int) -> float:
    """Returns how many times as long a step computes with other workers on its machine: their cores / its cores."""
    needed = workers_per_machine * profile.used_cores
    return max(1.0, needed / profile.cores) if profile.cores else 1.0


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
    num_updates: int = 0,
    steps_per_epoch: int = 0,
) -> simulation.Result:
    """Simulates a strategy on workers like the profiled device; see `simulation.simulate`.

    Args:
      profile: of one device.
      network: between the machines.
      strategy: name of the strategy.
      policies: new ones.
      workers: number of workers.
      servers: number of parameter servers.
      codec: cost of the codec of `Compression`.
      workers_per_machine: workers that share a machine's link and its cores.
      batch_size: examples of a step of each worker; by default the profile's.
      num_updates: updates to simulate; by default enough for a steady state.
      steps_per_epoch: updates of an epoch; 0 for one without end.
    """
    size = batch_size or profile.batch_size
    workers_per_machine = min(workers, workers_per_machine)
    slower = slowdown(profile, workers_per_machine)
    # The samples give the shape of the distribution, and the profile's sizes its mean.
    cluster = simulation.ClusterModel(
        workers=workers,
        workers_per_machine=workers_per_machine,
        servers=servers,
        compute=simulation.empirical(quantiles(profile.samples, _MOST_SAMPLES)),
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
        step_secs={count: secs * slower for count, secs in profile.step_secs.items()},
        optimizer_bytes=profile.optimizer_bytes,
        update_secs=_UPDATE_SECS[strategy],
    )
    is_asynchronous = strategy == PARAMETER_SERVER and not any(isinstance(each, Aggregation) for each in policies)
    return simulation.simulate(
        cluster,
        model,
        strategy=strategy,
        policies=policies,
        codec=codec,
        num_updates=num_updates or (max(_GRADIENTS, 8 * workers) if is_asynchronous else _UPDATES),
        steps_per_epoch=steps_per_epoch,
    )


def steady(result: simulation.Result) -> tuple[float, float]:
    """Returns examples and updates per second after the beginning of a simulation."""
    first = int(_BEGINNING * len(result.times))
    secs = result.times[-1] - result.times[first]
    if len(result.times) - first < 2 or secs <= 0:
        return result.examples_per_sec, result.updates_per_sec
    rate = (len(result.times) - 1 - first) / secs
    return rate * result.examples_per_sec / result.updates_per_sec, rate
