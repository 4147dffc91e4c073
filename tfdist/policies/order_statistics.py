# SPDX-License-Identifier: Apache-2.0
"""Expected arrival time of the k-th of n replicas, computed exactly from measured durations in plain Python."""

from __future__ import annotations

import cmath
import itertools
import operator
from collections.abc import Sequence


def expected_arrivals(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns the expected time of the k-th arrival if each replica draws its duration from its own samples.

    With F_i the empirical distribution function of replica i and S(x) the number of replicas that need no longer than x
    (Poisson-binomial, of probabilities F_i(x)),

        E[X(k:n)] = integral over x >= 0 of P(S(x) < k).

    If all replicas have the same m samples x_(1) <= x_(2) ..., this equals the sum of
    x_(i) [I_(i/m)(k, n-k+1) - I_((i-1)/m)(k, n-k+1)], with I the incomplete beta function. No random numbers are drawn.

    The distribution of S is found through its characteristic function, the product over i of (1 - F_i + F_i w) at the
    roots of unity w (Hong 2013, On computing the distribution function for the Poisson binomial distribution, equation
    7). The inverse transform is linear, so it is done once, after integrating over x. This takes about n/2 steps per
    sample.

    Args:
      samples: for each of the n replicas, at least one duration >= 0, all in the same unit.

    Returns:
      E[X(1:n)] to E[X(n:n)], in the unit of the samples; the error is at most about 1e-10 of the longest duration.

    Raises:
      ValueError: there is no replica, or a replica has no samples.
    """
    if not samples or not all(samples):
        raise ValueError(f"expected_arrivals(samples=...): each replica needs a sample. Received: {samples!r}")
    # Steps of the distribution functions in the order of time: from j/m to (j+1)/m, encoded as one number for (m, j).
    sizes = sorted({len(own) for own in samples})
    codes = dict(zip(sizes, itertools.accumulate(sizes, initial=0), strict=False))
    ends = sorted((secs, codes[len(own)] + j) for own in samples for j, secs in enumerate(sorted(own)))
    times = [secs for secs, _ in ends]
    steps = [step for _, step in ends]
    gaps = list(map(operator.sub, times, [0.0, *times]))
    # An odd number of roots of unity, more than the n + 1 values of S if n is odd: at w = -1 a factor can be zero.
    roots = len(samples) + 1 + len(samples) % 2
    transform = [_integral(gaps, steps, sizes, cmath.exp(2j * cmath.pi * root / roots)) for root in _half(roots)]
    exactly = [_inverse(transform, count, times[-1], roots) for count in range(len(samples))]
    return list(itertools.accumulate(exactly))


def _half(roots: int) -> range:
    """Returns the indices of one root of unity from each pair of conjugates; the root 1 is left out."""
    return range(1, roots // 2 + 1)


def _integral(gaps: list[float], steps: list[int], sizes: list[int], w: complex) -> complex:
    """Integrates the characteristic function of S(x) at w over x."""
    # In logarithms: with hundreds of replicas the product is smaller than a float can be, and grows again later.
    increments: list[complex] = []
    for size in sizes:
        logs = [cmath.log(1 + j / size * (w - 1)) for j in range(size + 1)]
        increments += map(operator.sub, logs[1:], logs)
    logs = itertools.accumulate(map(increments.__getitem__, steps), initial=0j)
    return sum(map(operator.mul, gaps, map(cmath.exp, logs)), 0j)


def _inverse(transform: list[complex], count: int, total: float, roots: int) -> float:
    """Returns the integral over x of P(S(x) = count); `total` is the transform at 1."""
    turned = (value * cmath.exp(-2j * cmath.pi * root * count / roots) for root, value in enumerate(transform, 1))
    return (total + 2 * sum(value.real for value in turned)) / roots
