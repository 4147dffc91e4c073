# SPDX-License-Identifier: Apache-2.0
"""Closed forms of communication costs, without queueing: the time of one exchange among p participants."""

from __future__ import annotations


def ring_all_reduce_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns 2 (p - 1) a + 2 (p - 1) / p n / B, the time of a ring all-reduce of n bytes.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.

    Args:
      size: n, bytes.
      participants: p.
      bandwidth: B, bytes per second of each link, in each direction.
      latency_secs: a, of one message.
    """
    others = participants - 1
    return 2 * others * latency_secs + 2 * others / participants * size / bandwidth if others else 0.0


def ring_all_gather_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns (p - 1) (a + n / B), the time until each of p participants has the n bytes of all others."""
    return (participants - 1) * (latency_secs + size / bandwidth)


def broadcast_secs(size: float, participants: int, bandwidth: float, latency_secs: float = 0.0) -> float:
    """Returns ceil(log2 p) (a + n / B), the time of a binomial-tree broadcast of n bytes to p - 1 others."""
    return (participants - 1).bit_length() * (latency_secs + size / bandwidth)


def parameter_server_secs(
    size: float,
    workers: int,
    servers: int,
    worker_bandwidth: float,
    server_bandwidth: float,
    latency_secs: float = 0.0,
) -> float:
    """Returns 2 a + max(2 n / B_worker, 2 n p / (S B_server)): p workers fetch and push n bytes at the same time.

    Args:
      size: n, bytes.
      workers: p.
      servers: S, which hold equal shares.
      worker_bandwidth: B_worker, bytes per second of each worker's link, in each direction.
      server_bandwidth: B_server, of each server's link.
      latency_secs: a, of one message.
    """
    return 2 * latency_secs + max(2 * size / worker_bandwidth, 2 * size * workers / (servers * server_bandwidth))
