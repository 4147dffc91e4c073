# SPDX-License-Identifier: Apache-2.0
"""Bottleneck of a candidate, such as "the server's link is full from 6 workers on"."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from tfdist.advisor import prediction
from tfdist.advisor.candidates import PARAMETER_SERVER, Candidate
from tfdist.advisor.network import Network
from tfdist.advisor.prediction import Prediction
from tfdist.advisor.profile import Profile

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


def of(
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
    return Limit("transfers", f"none yet; {whose} full from {workers} workers on" if workers else "sending variables")


def _is_software(network: Network) -> bool:
    return network.model().bandwidth < network.bandwidth / 2


def expected_slowest(samples: tuple[float, ...], candidate: Candidate) -> float:
    """Expected seconds until the last worker whose gradient counts has arrived, in one update."""
    ordered = sorted(samples)
    share = (candidate.workers - candidate.spares) / (candidate.workers + 1)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
