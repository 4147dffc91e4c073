# SPDX-License-Identifier: Apache-2.0
"""Models of a cluster, its network, and the trained model: the input of the simulator. All are checked when built.

Bandwidths, sizes and times are numbers in bytes per second, bytes and seconds, or text such as "10Gbit", "100MB" and
"50us". The objects keep numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tfdist import _checks
from tfdist.planning.simulation.delay_distributions import DelayDistribution

# Bandwidths, sizes and times as people write them: "10Gbit", "100MB", "50us".


_TEXT = re.compile(r"\s*(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = {**_DECIMAL, **_BINARY}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _PREFIXES.items()}
_RATES = {
    **{f"{unit}{end}": factor for unit, factor in (*_BITS.items(), *_BYTES.items()) for end in ("", "/s")},
    **{f"{prefix}b{end}": factor / 8 for prefix, factor in _DECIMAL.items() for end in ("/s", "ps")},
}
_SECS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}


def bytes_per_sec(value: object, name: str = "bandwidth") -> float:
    """Returns a bandwidth in bytes per second: a number as it is, "10Gbit" and "10Gb/s" as bits, "1GB/s" as bytes.

    Raises:
      ValueError: the value is not greater than 0, or its unit is unknown.
    """
    return _number(value, name, _RATES, "10Gbit or 1GB/s", least=None)


def num_bytes(value: object, name: str = "size") -> float:
    """Returns a size in bytes: a number as it is, "100MB" as 1e8, "1GiB" as 2**30.

    Raises:
      ValueError: the value is negative, or its unit is unknown.
    """
    return _number(value, name, _BYTES, "100MB", least=0.0)


def secs(value: object, name: str = "time") -> float:
    """Returns a time in seconds: a number as it is, "50us" and "10ms" by their units.

    Raises:
      ValueError: the value is negative, or its unit is unknown.
    """
    return _number(value, name, _SECS, "50us or 0.1s", least=0.0)


def _number(value: object, name: str, units: dict[str, float], example: str, least: float | None) -> float:
    number, unit = value, ""
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        # A bandwidth without a unit may be meant in bits or bytes, and a time in us, if its name does not tell.
        needs_unit = units is _RATES or (units is _SECS and "secs" not in name)
        if match is None or (match[2] not in units if match[2] else needs_unit):
            raise ValueError(f"{name} has no known unit; write it like {example}. Received: {value!r}")
        number, unit = float(match[1]), match[2]
    if not _checks.is_number(number, is_finite=False):
        raise ValueError(f"{name} must be a number, or text like {example}. Received: {value!r}")
    result = float(number) * (units[unit] if unit else 1.0)
    if result < 0 or (least is None and result == 0):
        raise ValueError(f"{name} must be {'greater than 0' if least is None else '0 or more'}. Received: {value!r}")
    return result


EVERY_WORKER = "*"
_INDEX_BYTES = 8
_WORKER = re.compile(r"worker:(\d+)")


@dataclasses.dataclass(frozen=True)
class NetworkModel:
    """Bandwidth and latency of the links.

    Attributes:
      bandwidth: of each machine's link to the others, in each direction; `inf` for a network that costs no time.
      latency_secs: of one message between machines.
      within_bandwidth: between devices, or processes, of one machine, per device.
      within_latency_secs: of one message within a machine.
      server_bandwidth: of each parameter server's link; that of the other machines by default.
      queueing: how transfers share a server's link: "fair", all at once, as TCP connections do; or "fifo", one after
        another. By default fair for synchronous training, whose workers fetch at the same time, and first come, first
        served for asynchronous training, whose workers spread out. (Under "fair", workers with nearly equal computing
        times stay in step, and use each direction of the link in turn only.)
    """

    bandwidth: Any = math.inf
    latency_secs: Any = 0.0
    within_bandwidth: Any = math.inf
    within_latency_secs: Any = 0.0
    server_bandwidth: Any = None
    queueing: Literal["fair", "fifo"] | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "within_bandwidth", "server_bandwidth"):
            if getattr(self, name) is not None:
                _set(self, name, bytes_per_sec(getattr(self, name), f"NetworkModel({name}=...)"))
        for name in ("latency_secs", "within_latency_secs"):
            _set(self, name, secs(getattr(self, name), f"NetworkModel({name}=...)"))
        if self.queueing not in (None, "fair", "fifo"):
            raise ValueError(f'NetworkModel(queueing=...) must be "fair" or "fifo". Received: {self.queueing!r}')


@dataclasses.dataclass(frozen=True)
class Failure:
    """Loss of one worker at a known time.

    Attributes:
      secs: simulated time of the loss.
      worker: index of the worker.
      back_after_secs: time until the worker is back; None for never.
    """

    secs: Any
    worker: int
    back_after_secs: Any = None

    def __post_init__(self) -> None:
        _set(self, "secs", secs(self.secs, "Failure(secs=...)"))
        _checks.check_count("Failure", "worker", self.worker, at_least=0)
        if self.back_after_secs is not None:
            _set(self, "back_after_secs", secs(self.back_after_secs, "Failure(back_after_secs=...)"))


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """Machines on which a job runs.

    Attributes:
      workers: number of worker processes.
      devices_per_worker: devices of each; a worker's gradient is the mean over its devices, and waits for the slowest.
      workers_per_machine: how many workers share a machine's link. If one machine has room for all workers, traffic
        between them stays within it.
      servers: number of parameter servers; 0 for strategies without them.
      compute: distribution of the seconds that a device computes for one step. If the model has step times of its own,
        only the shape of the distribution counts: its mean is scaled to them.
      speeds: relative speed by worker, such as {"worker:3": 0.1}; "*" for all others; 1 by default.
      delays: additional delay of each step by worker, as in `tfdist.testing.Delays`, and with the same draws.
      failures: losses at known times.
      network: bandwidths and latencies.
    """

    workers: int = 1
    devices_per_worker: int = 1
    workers_per_machine: int = 1
    servers: int = 1
    compute: DelayDistribution | None = None
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    delays: Mapping[str, DelayDistribution] = dataclasses.field(default_factory=dict)
    failures: Sequence[Failure] = ()
    network: NetworkModel = dataclasses.field(default_factory=NetworkModel)

    def __post_init__(self) -> None:
        for name in ("workers", "devices_per_worker", "workers_per_machine"):
            _checks.check_count("ClusterModel", name, getattr(self, name), at_least=1)
        _checks.check_count("ClusterModel", "servers", self.servers, at_least=0)
        if self.compute is not None:
            _check_distribution("ClusterModel(compute=...)", self.compute)
        for name in ("speeds", "delays"):
            for worker in getattr(self, name):
                _check_worker(f"ClusterModel({name}=...)", worker, self.workers)
        for worker, speed in self.speeds.items():
            if not _checks.is_number(speed, is_finite=False) or not 0 < speed < math.inf:
                raise ValueError(f"ClusterModel(speeds=...) must be numbers above 0. Received: {worker!r}: {speed!r}")
        for worker, delay in self.delays.items():
            _check_distribution(f"ClusterModel(delays={{{worker!r}: ...}})", delay)
        for failure in self.failures:
            if not isinstance(failure, Failure) or failure.worker >= self.workers:
                raise ValueError(
                    f"ClusterModel(failures=...) must be Failures of workers 0 to {self.workers - 1}. "
                    f"Received: {failure!r}"
                )
        if not isinstance(self.network, NetworkModel):
            raise ValueError(f"ClusterModel(network=...) must be a NetworkModel. Received: {self.network!r}")

    @property
    def machines(self) -> int:
        """Number of machines with workers."""
        return math.ceil(self.workers / self.workers_per_machine)

    @property
    def is_one_machine(self) -> bool:
        """True if several workers share the only machine, so that all traffic stays within it."""
        return self.machines == 1 and self.workers_per_machine > 1

    def speed(self, worker: int) -> float:
        """Returns the relative speed of a worker."""
        return self.speeds.get(f"worker:{worker}", self.speeds.get(EVERY_WORKER, 1.0))


@dataclasses.dataclass(frozen=True)
class SparseTable:
    """An embedding table, of which a step reads and updates some rows only.

    Attributes:
      rows_touched: distinct rows that one step of one device touches.
      row_bytes: bytes of one row.
    """

    rows_touched: float
    row_bytes: Any

    def __post_init__(self) -> None:
        if not _checks.is_number(self.rows_touched, is_finite=False) or self.rows_touched < 0:
            raise ValueError(
                f"SparseTable(rows_touched=...) must be a number of at least 0. Received: {self.rows_touched!r}"
            )
        _set(self, "row_bytes", num_bytes(self.row_bytes, "SparseTable(row_bytes=...)"))


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """The model that is trained, and the cost of a step on one device.

    Attributes:
      dense_bytes: bytes of the dense trainable variables; a gradient has as many.
      sparse_tables: embedding tables.
      batch_size: examples in the batch of one device.
      step_secs: seconds of one step on one device: a number, or a table {batch size: seconds}, between whose entries
        the time is interpolated linearly. By default the cluster's distribution alone says it.
      update_secs: seconds from the last gradient of an update until replicas may start the next one, communication not
        included: the optimizer's step, and the loop's overhead.
      optimizer_bytes: bytes of the optimizer's slots.
      overlap: share of a step's computing time during which an all-reduce of its gradients can already run; 0 to 1.
    """

    dense_bytes: Any = 0.0
    sparse_tables: Sequence[SparseTable] = ()
    batch_size: int = 1
    step_secs: float | str | Mapping[int, float] | None = None
    update_secs: Any = 0.0
    optimizer_bytes: Any = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dense_bytes", "optimizer_bytes"):
            _set(self, name, num_bytes(getattr(self, name), f"ModelProfile({name}=...)"))
        _set(self, "update_secs", secs(self.update_secs, "ModelProfile(update_secs=...)"))
        _checks.check_count("ModelProfile", "batch_size", self.batch_size, at_least=1)
        if not all(isinstance(table, SparseTable) for table in self.sparse_tables):
            raise ValueError(f"ModelProfile(sparse_tables=...) must be SparseTables. Received: {self.sparse_tables!r}")
        if not _checks.is_number(self.overlap, is_finite=False) or not 0 <= self.overlap <= 1:
            raise ValueError(f"ModelProfile(overlap=...) must be a share from 0 to 1. Received: {self.overlap!r}")
        self._check_step_secs()

    def _check_step_secs(self) -> None:
        if isinstance(self.step_secs, Mapping):
            if not self.step_secs:
                raise ValueError("ModelProfile(step_secs=...) must have a batch size. Received: {}")
            table = {}
            for size, each in self.step_secs.items():
                _checks.check_count("ModelProfile", "step_secs", size, at_least=1)
                table[size] = secs(each, f"ModelProfile(step_secs={{{size!r}: ...}})")
            _set(self, "step_secs", dict(sorted(table.items())))
        elif self.step_secs is not None:
            _set(self, "step_secs", secs(self.step_secs, "ModelProfile(step_secs=...)"))

    @property
    def mean_step_secs(self) -> float | None:
        """Seconds of one step with `batch_size` examples on one device; None if unknown."""
        if not isinstance(self.step_secs, Mapping):
            return self.step_secs  # type: ignore[return-value]
        return _interpolated(list(self.step_secs.items()), self.batch_size)

    @property
    def sparse_bytes(self) -> float:
        """Bytes of the rows that one step touches."""
        return sum(table.rows_touched * table.row_bytes for table in self.sparse_tables)

    @property
    def sparse_gradient_bytes(self) -> float:
        """Bytes of the gradients of these rows, with the rows' indices."""
        return self.sparse_bytes + sum(table.rows_touched * _INDEX_BYTES for table in self.sparse_tables)


@dataclasses.dataclass(frozen=True)
class CodecModel:
    """Cost of a codec of `tfdist.Compression`, as far as time is concerned.

    Attributes:
      ratio: encoded bytes / bytes, above 0.
      encode_bandwidth: bytes (before encoding) that a worker encodes per second.
      decode_bandwidth: bytes (before encoding) that are decoded per second.
      commutes_with_sum: True if encoded gradients can be summed, so that an all-reduce can carry them; otherwise each
        worker receives those of all others.
      variables_ratio: bytes of variables sent by parameter servers / their bytes, with `Compression(variables=...)`.
    """

    ratio: float
    encode_bandwidth: Any = math.inf
    decode_bandwidth: Any = math.inf
    commutes_with_sum: bool = False
    variables_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("ratio", "variables_ratio"):
            if not _checks.is_number(getattr(self, name), is_finite=False) or not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"CodecModel({name}=...) must be a number above 0. Received: {getattr(self, name)!r}")
        for name in ("encode_bandwidth", "decode_bandwidth"):
            _set(self, name, bytes_per_sec(getattr(self, name), f"CodecModel({name}=...)"))


def _check_worker(argument: str, name: object, workers: int) -> None:
    """Raises ValueError unless there is a worker of this name, such as "worker:3", or it is "*"."""
    match = _WORKER.fullmatch(name) if isinstance(name, str) else None
    if name != EVERY_WORKER and (match is None or int(match[1]) >= workers):
        raise ValueError(f'{argument} is by worker: "worker:0" to "worker:{workers - 1}", or "*". Received: {name!r}')


def _interpolated(points: list[tuple[int, float]], size: int) -> float:
    """Interpolates linearly; beyond the largest size in proportion to the last slope, below the smallest constant."""
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    if size <= points[0][0]:
        return points[0][1]
    upper = next((index for index, point in enumerate(points) if point[0] >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


def _check_distribution(argument: str, value: object) -> None:
    if not isinstance(value, DelayDistribution):
        raise ValueError(f"{argument} must be a distribution such as lognormal(mean=0.2, s=1.0). Received: {value!r}")
    if not math.isfinite(value.mean):
        raise ValueError(f"{argument} must be a distribution with a finite mean. Received: {value!r}")


def _set(owner: Any, name: str, value: Any) -> None:
    # The dataclasses are frozen.
    object.__setattr__(owner, name, value)
