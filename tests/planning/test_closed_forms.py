# SPDX-License-Identifier: Apache-2.0
"""Closed forms: published tables, and agreement with the simulator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import closed_forms
import pytest

import tfdist
from tfdist.planning import simulation
from tfdist.planning.simulation import links
from tfdist.planning.simulation.delay_distributions import DelayDistribution
from tfdist.policies import backup_workers
from tfdist.policies.asynchronous import Asynchronous

_SECS = 0.1


# n = 100, k = 90, 95, 96, 99 and 100.
@pytest.mark.parametrize(
    ("distribution", "published"),
    [
        (simulation.exponential(1.0), (2.2584, 2.9040, 3.1040, 4.1874, 5.1874)),
        (simulation.pareto(mean=2.0, a=2.0), (3.1269, 4.3674, 4.8526, 8.8734, 17.7467)),
        (simulation.lognormal(math.exp(0.25**2 / 2), 0.25), (1.3679, 1.4905, 1.5269, 1.7161, 1.8829)),
        (simulation.lognormal(math.exp(0.5), 1.0), (3.5383, 5.0134, 5.5342, 9.0096, 13.595)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_order_statistics_equal_the_published_table(distribution: DelayDistribution, published: tuple[float, ...]):
    found = [closed_forms.expected_arrival(distribution, k, 100) for k in (90, 95, 96, 99, 100)]
    assert found == pytest.approx(published, rel=1e-4)


def test_order_statistics_of_samples_are_near_those_of_policies():
    samples = [0.5, 0.7, 1.0, 1.1, 4.0]
    found = [closed_forms.expected_arrival(simulation.empirical(samples), k, 60) for k in range(1, 61)]
    # The policy draws 1,024 times.
    assert found == pytest.approx(backup_workers.expected_arrivals([samples] * 60), rel=0.04)


@pytest.mark.parametrize(
    "distribution",
    [
        simulation.constant(0.3),
        simulation.exponential(0.3),
        simulation.shifted_exponential(0.2, 0.3),
        simulation.pareto(0.3, 3.0),
        simulation.lognormal(0.3, 0.7),
        simulation.empirical([0.1, 0.2, 0.6]),
        simulation.stalls(0.3, 4),
    ],
    ids=lambda value: value.name,
)
def test_arrivals_of_one_and_the_sum_of_all_equal_the_mean(distribution: DelayDistribution):
    assert closed_forms.expected_arrival(distribution, 1, 1) == pytest.approx(distribution.mean, rel=1e-6)
    total = math.fsum(closed_forms.expected_arrival(distribution, k, 12) for k in range(1, 13))
    assert total == pytest.approx(12 * distribution.mean, rel=1e-6)


@pytest.mark.parametrize(
    ("distribution", "best"),
    [
        *((simulation.shifted_exponential(shift, shift + 1.0), b) for shift, b in ((1, 31), (5, 12), (10, 7), (20, 4))),
        *((simulation.lognormal(1.0, s), b) for s, b in ((0.1, 4), (0.25, 13), (0.5, 30))),
    ],
    ids=str,
)
def test_best_spares_equal_the_published_table(distribution: DelayDistribution, best: int):
    assert closed_forms.best_spares(distribution, 100) == best


def test_best_spares_of_the_published_tail_are_four_of_100():
    """Chen et al. 2016: 30 % of the last gradients of 100 arrive within 2 s; they found N = 96, b = 4 the best.

    The tail alone fixes P(X <= 2 s) = 0.3^(1/100). A lognormal distribution needs a second point: the middle of the
    times that figure 4 of the paper shows for most gradients, 1.4 s to 1.8 s.
    """
    share = 0.3 ** (1 / 100)
    s = math.log(2.0 / 1.6) / statistics.NormalDist().inv_cdf(share)
    distribution = simulation.lognormal(1.6 * math.exp(s * s / 2), s)
    assert distribution.quantile(share) == pytest.approx(2.0)
    assert closed_forms.best_spares(distribution, 100) == 4


def test_a_ring_and_a_parameter_server_cost_what_the_formulas_say():
    size, bandwidth = 102.4e6, 10e9 / 8
    assert links.ring_all_reduce_secs(size, 8, bandwidth) == pytest.approx(0.143, abs=5e-4)
    assert closed_forms.parameter_server_secs(size, 8, 1, bandwidth, bandwidth) == pytest.approx(1.31, abs=5e-3)


def _simulated(strategy: str, workers: int, servers: int, policies: Callable[[], list], **network: object):
    cluster = simulation.ClusterModel(
        workers=workers,
        servers=servers,
        compute=simulation.constant(_SECS),
        network=simulation.NetworkModel(bandwidth=10e9 / 8, latency_secs=1e-3, **network),  # type: ignore[arg-type]
    )
    model = simulation.ModelProfile(dense_bytes=102.4e6)
    return simulation.simulate(cluster, model, strategy=strategy, policies=policies(), num_updates=50)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 1), (8, 4), (3, 16)])
def test_synchronous_parameter_servers_cost_the_closed_form(workers: int, servers: int):
    found = _simulated("ParameterServerStrategy", workers, servers, lambda: [tfdist.BackupWorkers(spares=0)])
    secs = closed_forms.parameter_server_secs(102.4e6, workers, servers, 10e9 / 8, 10e9 / 8, 1e-3)
    assert found.seconds / 50 == pytest.approx(_SECS + secs, rel=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_ring_all_reduce_in_the_simulator_costs_the_closed_form(workers: int):
    found = _simulated("MultiWorkerMirroredStrategy", workers, 0, list)
    secs = links.ring_all_reduce_secs(102.4e6, workers, 10e9 / 8, 1e-3)
    # The last update ends when its gradients have arrived.
    assert found.seconds == pytest.approx(50 * _SECS + 49 * secs, rel=1e-9)


@pytest.mark.parametrize(("workers", "servers"), [(8, 1), (32, 4)])
def test_asynchronous_training_saturates_at_the_servers_bandwidth(workers: int, servers: int):
    found = _simulated("ParameterServerStrategy", workers, servers, list)
    limit = servers * (10e9 / 8) / 102.4e6
    assert 0.8 * limit < found.updates_per_sec <= limit
    assert "is full" in found.limit


@pytest.mark.parametrize("distribution", [simulation.exponential(0.2), simulation.lognormal(0.2, 0.5)], ids=str)
def test_policies_alone_take_the_expected_times(distribution: DelayDistribution):
    def secs(replica: int, attempt: int) -> float:
        return distribution.draw(1, replica, attempt)

    waiting = simulation.simulate_policy(tfdist.BackupWorkers(spares=0), secs, 1000, 8)
    assert waiting.seconds / 1000 == pytest.approx(closed_forms.synchronous_secs(distribution, 8), rel=0.03)
    free = simulation.simulate_policy(Asynchronous(tfdist.SoftSync(4)), secs, 2000, 8)
    assert free.seconds / 2000 == pytest.approx(closed_forms.k_batch_async_secs(distribution, 4, 8), rel=0.03)
    speedup = 4 * free.updates_per_sec / waiting.updates_per_sec
    assert speedup == pytest.approx(closed_forms.asynchronous_speedup(distribution, 8), rel=0.05)


@pytest.mark.parametrize(("k", "n"), [(0, 3), (4, 3), (1, 0), (1.0, 3)])
def test_an_arrival_of_no_replica_is_refused(k: int, n: int):
    with pytest.raises(ValueError, match=r"k must be 1 to n\. Received: k="):
        closed_forms.expected_arrival(simulation.constant(1.0), k, n)
