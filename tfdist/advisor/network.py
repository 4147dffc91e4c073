# SPDX-License-Identifier: Apache-2.0
"""Network of a prediction: "local", a bandwidth such as 10Gbit, or a file of `tfdist doctor --measure`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics

from tfdist import doctor_measure
from tfdist.simulation import NetworkModel, units

# TensorFlow's own part of each message on CPUs, measured with TensorFlow 2.21 between two processes of one machine: a
# sum of 4 floats takes 2 ms, two messages; one of a million floats 14 ms, so that its gRPC moves about 0.35 GB/s.
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
        latency_secs = units.secs(latency, "--latency") if latency else _LOOPBACK_LATENCY_SECS
        shown = "all workers on this machine"
        return Network(_LOOPBACK_BANDWIDTH, latency_secs, _UNMEASURED, software, shown, is_one_machine=True)
    path = pathlib.Path(text)
    if path.suffix == ".json" or path.is_file():
        return _from_file(path, latency, software)
    bandwidth = units.bytes_per_sec(text if not _is_number(text) else float(text), "--network")
    latency_secs = units.secs(latency or "50us", "--latency")
    return Network(bandwidth, latency_secs, _UNMEASURED, software, f"{text}, {1e6 * latency_secs:.0f} us")


def _from_file(path: pathlib.Path, latency: str | None, software: float) -> Network:
    try:
        links, is_one_machine = doctor_measure.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--network: can't read {path} ({error}); write it with tfdist doctor --measure --json={path}, or give a "
            "bandwidth such as 10Gbit"
        ) from None
    speeds = [link.bytes_per_sec for link in links]
    # A synchronous step waits for the slowest link, so its speed counts; the spread says how sure it is.
    bandwidth, middle = min(speeds), statistics.median(speeds)
    latency_secs = (
        units.secs(latency, "--latency") if latency else statistics.median(each.latency_secs for each in links)
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
