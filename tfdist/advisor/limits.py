# SPDX-License-Identifier: Apache-2.0
"""Binding limits in words, such as "the server's link is full from 6 workers on"."""

from __future__ import annotations

import math
import statistics

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


def in_words(profile: Profile, network: Network, candidate: Candidate, prediction: Prediction) -> str:
    """Returns what limits a candidate."""
    link = network.model().bandwidth
    is_software = link < network.bandwidth / 2
    name = "TensorFlow's transport" if is_software else "the network"
    if candidate.strategy == PARAMETER_SERVER:
        workers = full_from(profile, network, candidate)
        whose = "the server's link is" if candidate.servers == 1 else f"the links of {candidate.servers} servers are"
        suffix = " (TensorFlow's transport, not the network)" if is_software else ""
        if workers and candidate.workers >= workers:
            return f"{whose} full from {workers} workers on{suffix}"
        if prediction.efficiency < _MOSTLY:
            return f"sending and fetching variables takes {1 - prediction.efficiency:.0%} of the time{suffix}"
        return (
            "the devices compute most of the time"
            if not workers
            else f"none yet; {whose} full from {workers} workers on"
        )
    if prediction.efficiency >= 0.9:
        return "the devices compute most of the time"
    samples = profile.samples
    waiting = expected_slowest(samples, candidate) / statistics.fmean(samples) - 1
    lost = 1 / prediction.efficiency - 1
    if waiting > 0.5 * lost:
        return f"waiting for the slowest of {candidate.workers} workers"
    return f"{name}: sums take {(lost - waiting) / (1 + lost):.0%} of the time"


def expected_slowest(samples: tuple[float, ...], candidate: Candidate) -> float:
    """Expected seconds until the last worker whose gradient counts has arrived, in one update."""
    ordered = sorted(samples)
    share = (candidate.workers - candidate.spares) / (candidate.workers + 1)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
