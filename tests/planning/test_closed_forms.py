# SPDX-License-Identifier: Apache-2.0
"""The simulator agrees with closed forms where they apply."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import tfdist
from tfdist.planning import simulation
from tfdist.planning.simulation import event_loop
from tfdist.policies.asynchronous import Asynchronous

_SECS = 0.1
_BYTES, _BANDWIDTH, _LATENCY_SECS = 102.4e6, 10e9 / 8, 1e-3


def _parameter_server_secs(workers: int, servers: int) -> float:
    """2 a + max(2 n / B, 2 n p / (S B)): p workers fetch and push n bytes at the same time, of S servers."""
    return 2 * _LATENCY_SECS + 2 * _BYTES / _BANDWIDTH * max(1, workers / servers)


def _simulated(strategy: str, workers: int, servers: int, policies: Callable[[], list]) -> simulation.Simulation:
    cluster = simulation.ClusterModel(
        workers=workers,
        servers=servers,
        compute=simulation.constant(_SECS),
        network=simulation.NetworkModel(bandwidth=_BANDWIDTH, latency_secs=_LATENCY_SECS),
    )
    model = simulation.ModelProfile(dense_bytes=_BYTES)
    return simulation.simulate(cluster, model, strategy=strategy, policies=policies(), num_updates=50)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 1), (8, 4), (3, 16)])
def test_synchronous_parameter_servers_cost_the_closed_form(workers: int, servers: int):
    found = _simulated("ParameterServerStrategy", workers, servers, lambda: [tfdist.BackupWorkers(spares=0)])
    assert found.seconds / 50 == pytest.approx(_SECS + _parameter_server_secs(workers, servers), rel=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_ring_all_reduce_in_the_simulator_costs_the_closed_form(workers: int):
    found = _simulated("MultiWorkerMirroredStrategy", workers, 0, list)
    secs = event_loop.ring_all_reduce_secs(_BYTES, workers, _BANDWIDTH, _LATENCY_SECS)
    # The last update ends when its gradients have arrived.
    assert found.seconds == pytest.approx(50 * _SECS + 49 * secs, rel=1e-9)


@pytest.mark.parametrize(("workers", "servers"), [(8, 1), (32, 4)])
def test_asynchronous_training_saturates_at_the_servers_bandwidth(workers: int, servers: int):
    found = _simulated("ParameterServerStrategy", workers, servers, list)
    limit = servers * _BANDWIDTH / _BYTES
    assert 0.8 * limit < found.updates_per_sec <= limit
    assert "is full" in found.limit


def test_policies_alone_take_the_expected_times():
    """The largest of n exponential times is 1/1 + ... + 1/n means; k gradients of n that never wait take k/n means.

    Source: Dutta et al. 2018, arXiv 1803.01113, section 3.
    """
    mean, harmonic = 0.2, math.fsum(1 / k for k in range(1, 9))
    distribution = simulation.exponential(mean)

    def secs(replica: int, attempt: int) -> float:
        return distribution.draw(1, replica, attempt)

    waiting = simulation.simulate_policy(tfdist.BackupWorkers(spares=0), secs, 1000, 8)
    assert waiting.seconds / 1000 == pytest.approx(mean * harmonic, rel=0.03)
    free = simulation.simulate_policy(Asynchronous(tfdist.SoftSync(4)), secs, 2000, 8)
    assert free.seconds / 2000 == pytest.approx(mean * 4 / 8, rel=0.03)
    assert 4 * free.updates_per_sec / waiting.updates_per_sec == pytest.approx(8 * harmonic, rel=0.05)
