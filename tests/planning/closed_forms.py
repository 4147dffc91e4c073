# SPDX-License-Identifier: Apache-2.0
"""Exact expectations for independent replicas: arrivals of the k-th of n, time per update, best number of spares;
and the cost of messages with parameter servers.

The simulator is tested against them where they apply.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable

from tfdist import _checks
from tfdist.planning.simulation.delay_distributions import DelayDistribution

# Steps of the trapezoidal rule per standard deviation, and the share of the peak at which the tails are cut.
_STEPS = 16
_CUT = 1e-18
_FRACTION_STEPS = 500


def expected_arrival(distribution: DelayDistribution, k: int, n: int) -> float:
    """Returns E[X(k:n)], the expected time of the k-th arrival of n independent replicas.

    E[X(k:n)] is the integral over u in (0, 1) of Q(u) b(u; k, n-k+1), with Q the quantile function and b the density of
    the beta distribution (David and Nagaraja 2003, Order Statistics, equation 3.1.1). It is evaluated in closed form
    for all distributions but the lognormal one, whose error is below 1e-6 of the result.

    Args:
      distribution: of each replica's time.
      k: 1 to n.
      n: number of replicas.

    Raises:
      ValueError: k or n is invalid.
    """
    if not _checks.is_count(n, at_least=1) or not _checks.is_count(k, at_least=1) or k > n:
        raise ValueError(f"expected_arrival(k=..., n=...): k must be 1 to n. Received: k={k!r}, n={n!r}")
    return _FORMULAS[distribution.name](distribution, k, n)


def best_spares(distribution: DelayDistribution, total_num_replicas: int, max_spares: int | None = None) -> int:
    """Returns the number of spares b that maximises N / E[X(N:n)], N = n - b: the most gradients per second.

    Two assumptions: training needs a number of updates proportional to 1 / N, as in Chen et al. 2016 (arXiv 1604.00981,
    section 3.2), and each update is a fresh draw.

    Args:
      distribution: of each replica's time.
      total_num_replicas: n.
      max_spares: the most to choose; (n - 1) // 2 by default, as for `tfdist.BackupWorkers`.

    Raises:
      ValueError: an argument is out of its range.
    """
    total = total_num_replicas
    most = (total - 1) // 2 if max_spares is None else max_spares
    if not _checks.is_count(total, at_least=1) or not _checks.is_count(most, at_least=0) or most >= total:
        raise ValueError(
            "best_spares(max_spares=...) must be 0 to total_num_replicas - 1. "
            f"Received: max_spares={max_spares!r}, total_num_replicas={total!r}"
        )

    def rate(spares: int) -> float:
        secs = expected_arrival(distribution, total - spares, total)
        return (total - spares) / secs if secs else math.inf

    return max(range(most + 1), key=rate)


def synchronous_secs(distribution: DelayDistribution, replicas: int) -> float:
    """Returns E[X(n:n)], the time per update if each update waits for all n replicas."""
    return expected_arrival(distribution, replicas, replicas)


def k_batch_async_secs(distribution: DelayDistribution, k: int, replicas: int) -> float:
    """Returns k E[X] / n, the time per update of any k gradients of n replicas that never wait (`tfdist.SoftSync(k)`).

    Source: Dutta et al. 2018, arXiv 1803.01113, section 3: K-batch-async SGD, for any distribution.
    """
    return k * distribution.mean / replicas


def asynchronous_speedup(distribution: DelayDistribution, replicas: int) -> float:
    """Returns n E[X(n:n)] / E[X]: asynchronous updates per second / synchronous updates per second."""
    return replicas * synchronous_secs(distribution, replicas) / distribution.mean


# Order statistics, by distribution.


def _constant(distribution: DelayDistribution, k: int, n: int) -> float:
    return distribution.mean


def _exponential(distribution: DelayDistribution, k: int, n: int) -> float:
    return distribution.mean * _harmonic(k, n)


def _shifted_exponential(distribution: DelayDistribution, k: int, n: int) -> float:
    shift = distribution.parameters["shift"]
    return shift + (distribution.mean - shift) * _harmonic(k, n)


def _harmonic(k: int, n: int) -> float:
    """H_n - H_(n-k)."""
    return math.fsum(1.0 / i for i in range(n - k + 1, n + 1))


def _pareto(distribution: DelayDistribution, k: int, n: int) -> float:
    a = distribution.parameters["a"]
    least = distribution.mean * (a - 1) / a
    logarithm = (
        math.lgamma(n + 1) + math.lgamma(n - k + 1 - 1 / a) - math.lgamma(n - k + 1) - math.lgamma(n + 1 - 1 / a)
    )
    return least * math.exp(logarithm)


def _lognormal(distribution: DelayDistribution, k: int, n: int) -> float:
    # From the smaller of u and 1 - u, which keeps its digits.
    low = distribution.quantile
    mean, s = distribution.mean, distribution.parameters["s"]
    squared_median = (mean * math.exp(-s * s / 2)) ** 2
    return _integral(lambda u, rest: low(u) if u <= 0.5 else squared_median / low(rest), k, n)


def _integral(quantile: Callable[[float, float], float], k: int, n: int) -> float:
    """Integrates quantile(u, 1 - u) against the beta density, by the trapezoidal rule in x = log(u / (1 - u)).

    In x the density is log-concave and analytic, and falls exponentially, so that the rule converges exponentially.
    """
    above = n - k + 1
    log_beta = math.lgamma(k) + math.lgamma(above) - math.lgamma(n + 1)
    centre = math.log(k / above)
    step = math.sqrt(1.0 / k + 1.0 / above) / _STEPS

    def term(index: int) -> float:
        x = centre + index * step
        log_u, log_rest = -_softplus(-x), -_softplus(x)
        density = math.exp(k * log_u + above * log_rest - log_beta)
        u, rest = math.exp(log_u), math.exp(log_rest)
        return density * quantile(u, rest) if min(u, rest) > 1e-300 else 0.0

    total = term(0)
    for direction in (1, -1):
        for index in itertools.count(direction, direction):
            each = term(index)
            total += each
            if each <= _CUT * total:
                break
    return total * step


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _empirical(distribution: DelayDistribution, k: int, n: int) -> float:
    samples = distribution.parameters["samples"]
    return _of_samples(samples, k, n)


def _stalls(distribution: DelayDistribution, k: int, n: int) -> float:
    every = distribution.parameters["every"]
    return _of_samples((*(0.0,) * (every - 1), distribution.parameters["secs"]), k, n)


def _of_samples(samples: tuple[float, ...], k: int, n: int) -> float:
    """The sum over m sorted samples of x_(i) [I_(i/m)(k, n-k+1) - I_((i-1)/m)(k, n-k+1)]."""
    shares = [incomplete_beta(i / len(samples), k, n - k + 1) for i in range(len(samples) + 1)]
    return math.fsum(map(operator.mul, samples, map(operator.sub, shares[1:], shares)))


def incomplete_beta(x: float, a: int, b: int) -> float:
    """Returns I_x(a, b), the regularised incomplete beta function, by its continued fraction (modified Lentz).

    Source: Press et al. 2007, Numerical Recipes, section 6.4.
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    c, d = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _FRACTION_STEPS * (1 + (a + b) // 10_000)):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _nonzero(1.0 + numerator * d)
            c = _nonzero(1.0 + numerator / c)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return front * fraction


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


_FORMULAS: dict[str, Callable[[DelayDistribution, int, int], float]] = {
    "constant": _constant,
    "exponential": _exponential,
    "shifted_exponential": _shifted_exponential,
    "pareto": _pareto,
    "lognormal": _lognormal,
    "empirical": _empirical,
    "stalls": _stalls,
}


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
