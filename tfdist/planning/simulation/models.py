# SPDX-License-Identifier: Apache-2.0
"""Models of a cluster, its network, and the trained model: the input of the simulator. All are checked when built.

Bandwidths, sizes and times are numbers in bytes per second, bytes and seconds, or text such as "10Gbit", "100MB" and
"50us". The objects keep numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from tfdist import _checks
from tfdist.planning.simulation.delay_distributions import DelayDistribution

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


def _number(value: object, name: str, units: dict[str, float], example: str, is_above_0: bool = False) -> float:
    """Returns a number as it is, and text by its unit; raises ValueError if it is negative, or its unit is unknown."""
    number, unit = value, ""
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        # A bandwidth without a unit may be meant in bits or bytes, and a time in us, if its name does not tell.
        needs_unit = units is _RATES or (units is _SECS and "secs" not in name)
        if match is None or (match[2] not in units if match[2] else needs_unit):
            raise ValueError(f"{name} has no known unit; write it like {example}. Received: {value!r:.200}")
        number, unit = float(match[1]), match[2]
    if not _checks.is_number(number, is_finite=False):
        raise ValueError(f"{name} must be a number, or text like {example}. Received: {value!r:.200}")
    result = float(number) * (units[unit] if unit else 1.0)
    if result < 0 or (is_above_0 and result == 0):
        raise ValueError(f"{name} must be {'greater than 0' if is_above_0 else '0 or more'}. Received: {value!r:.200}")
    return result


# Checks take a value, and the name of its argument.
_Check = Callable[[Any, str], Any]
bytes_per_sec = functools.partial(_number, units=_RATES, example="10Gbit or 1GB/s", is_above_0=True)
num_bytes = functools.partial(_number, units=_BYTES, example="100MB")
secs = functools.partial(_number, units=_SECS, example="50us or 0.1s")
EVERY_WORKER = "*"
_INDEX_BYTES = 8
_WORKER = re.compile(r"worker:(\d+)")


class Checked:
    """A frozen dataclass whose annotations check the values, and convert texts; a default of None is not checked.

    Raises:
      ValueError: a value is invalid; the message names its argument.
    """

    def __post_init__(self) -> None:
        for name, check in _checks_of(type(self)):
            value = getattr(self, name)
            if value is not None or getattr(type(self), name, ...) is not None:
                object.__setattr__(self, name, check(value, f"{type(self).__name__}({name}=...)"))


@functools.cache
def _checks_of(kind: type) -> list[tuple[str, _Check]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, check) for name, hint in hints.items() for check in getattr(hint, "__metadata__", ())]


def must(meaning: str, is_valid: Callable[[Any], bool]) -> _Check:
    """Makes a check that raises ValueError for a value that is invalid, and says what it must be."""

    def check(value: Any, name: str) -> Any:
        if not is_valid(value):
            raise ValueError(f"{name} must {meaning}. Received: {value!r:.200}")
        return value

    return check


def _is_number(value: Any, most: float = sys.float_info.max) -> bool:
    return _checks.is_number(value) and 0 <= value <= most


def _step_secs(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        return secs(value, name)
    if not value:
        raise ValueError(f"{name} must have a batch size. Received: {{}}")
    return {_count(size, name): secs(each, name) for size, each in sorted(value.items())}


_count = must("be an integer of at least 1", _checks.is_count)
_distribution = must(
    "be a distribution such as lognormal(mean=0.2, s=1.0)", lambda value: isinstance(value, DelayDistribution)
)
_factor = must("be a number above 0", lambda value: _is_number(value) and value > 0)
Rate = Annotated[Any, bytes_per_sec]
Size = Annotated[Any, num_bytes]
Secs = Annotated[Any, secs]
Count = Annotated[int, _count]
Index = Annotated[int, must("be an integer of at least 0", functools.partial(_checks.is_count, at_least=0))]
Factor = Annotated[float, _factor]
Amount = Annotated[float, must("be a number of at least 0", _is_number)]
Share = Annotated[float, must("be a share from 0 to 1", functools.partial(_is_number, most=1.0))]
Queueing = Annotated[Literal["fair", "fifo"] | None, must('be "fair" or "fifo"', ("fair", "fifo").__contains__)]


@dataclasses.dataclass(frozen=True)
class NetworkModel(Checked):
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

    bandwidth: Rate = math.inf
    latency_secs: Secs = 0.0
    within_bandwidth: Rate = math.inf
    within_latency_secs: Secs = 0.0
    server_bandwidth: Rate = None
    queueing: Queueing = None


@dataclasses.dataclass(frozen=True)
class Failure(Checked):
    """Loss of one worker at a known time.

    Attributes:
      secs: simulated time of the loss.
      worker: index of the worker.
      back_after_secs: time until the worker is back; None for never.
    """

    secs: Secs
    worker: Index
    back_after_secs: Secs = None


@dataclasses.dataclass(frozen=True)
class ClusterModel(Checked):
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

    workers: Count = 1
    devices_per_worker: Count = 1
    workers_per_machine: Count = 1
    servers: Index = 1
    compute: Annotated[DelayDistribution | None, _distribution] = None
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    delays: Mapping[str, DelayDistribution] = dataclasses.field(default_factory=dict)
    failures: Sequence[Failure] = ()
    network: NetworkModel = NetworkModel()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, check in (("speeds", _factor), ("delays", _distribution)):
            for worker, value in getattr(self, name).items():
                match = _WORKER.fullmatch(worker) if isinstance(worker, str) else None
                if worker != EVERY_WORKER and (match is None or int(match[1]) >= self.workers):
                    known = f'"worker:0" to "worker:{self.workers - 1}", or "*"'
                    raise ValueError(f"ClusterModel({name}=...) is by worker: {known}. Received: {worker!r}")
                check(value, f"ClusterModel({name}={{{worker!r}: ...}})")
        for failure in self.failures:
            if failure.worker >= self.workers:
                known = f"Failures of workers 0 to {self.workers - 1}"
                raise ValueError(f"ClusterModel(failures=...) must be {known}. Received: {failure!r}")

    @property
    def is_one_machine(self) -> bool:
        """True if several workers share the only machine, so that all traffic stays within it."""
        return self.workers_per_machine >= max(2, self.workers)

    def of_worker(self, name: Literal["speeds", "delays"], worker: int, default: Any) -> Any:
        """Returns the relative speed, or the delay, of a worker."""
        table = getattr(self, name)
        return table.get(f"worker:{worker}", table.get(EVERY_WORKER, default))


@dataclasses.dataclass(frozen=True)
class SparseTable(Checked):
    """An embedding table, of which a step reads and updates some rows only.

    Attributes:
      rows_touched: distinct rows that one step of one device touches.
      row_bytes: bytes of one row.
    """

    rows_touched: Amount
    row_bytes: Size


@dataclasses.dataclass(frozen=True)
class ModelProfile(Checked):
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

    dense_bytes: Size = 0.0
    sparse_tables: Sequence[SparseTable] = ()
    batch_size: Count = 1
    step_secs: Annotated[float | str | Mapping[int, float] | None, _step_secs] = None
    update_secs: Secs = 0.0
    optimizer_bytes: Size = 0.0
    overlap: Share = 0.0

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
class CodecModel(Checked):
    """Cost of a codec of `tfdist.Compression`, as far as time is concerned.

    Attributes:
      ratio: encoded bytes / bytes, above 0.
      encode_bandwidth: bytes (before encoding) that a worker encodes per second.
      decode_bandwidth: bytes (before encoding) that are decoded per second.
      commutes_with_sum: True if encoded gradients can be summed, so that an all-reduce can carry them; otherwise each
        worker receives those of all others.
      variables_ratio: bytes of variables sent by parameter servers / their bytes, with `Compression(variables=...)`.
    """

    ratio: Factor
    encode_bandwidth: Rate = math.inf
    decode_bandwidth: Rate = math.inf
    commutes_with_sum: bool = False
    variables_ratio: Factor = 1.0


def _interpolated(points: list[tuple[int, float]], size: int) -> float:
    """Interpolates linearly; beyond the largest size in proportion to the last slope, below the smallest constant."""
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    if size <= points[0][0]:
        return points[0][1]
    upper = next((index for index, point in enumerate(points) if point[0] >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))
