# SPDX-License-Identifier: Apache-2.0
"""Expected k-th arrivals: exact for samples, and close to the published values for the laws they were taken from."""

from __future__ import annotations

import fractions
import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.policies.backup_workers import expected_arrivals

_NORMAL = statistics.NormalDist().inv_cdf
_QUANTILES = {
    "exponential": lambda u: -math.log1p(-u),
    "Pareto a=2": lambda u: (1 - u) ** -0.5,
    "lognormal s=.1": lambda u: math.exp(0.1 * _NORMAL(u)),
    "lognormal s=.25": lambda u: math.exp(0.25 * _NORMAL(u)),
    "lognormal s=.5": lambda u: math.exp(0.5 * _NORMAL(u)),
    "lognormal s=1": lambda u: math.exp(_NORMAL(u)),
}


def _hundred(law: str, size: int = 400) -> list[float]:
    """Expected arrivals of 100 replicas that all draw from the same quantiles of a law."""
    quantile = _QUANTILES[law]
    return expected_arrivals([[quantile((i + 0.5) / size) for i in range(size)]] * 100)


def _enumerated(samples: list[list[float]]) -> list[float]:
    draws = [sorted(draw) for draw in itertools.product(*samples)]
    return [statistics.fmean(column) for column in zip(*draws, strict=True)]


def _incomplete_beta(x: fractions.Fraction, k: int, n: int) -> fractions.Fraction:
    """I_x(k, n - k + 1): that k or more of n arrive, each with probability x."""
    terms = (math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(k, n + 1))
    return sum(terms, fractions.Fraction(0))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_it_is_the_mean_over_all_draws(samples: list[list[float]]):
    assert expected_arrivals(samples) == pytest.approx(_enumerated(samples), abs=1e-9)


@pytest.mark.parametrize("replicas", [7, 100])
def test_it_is_the_formula_with_the_incomplete_beta_function(replicas: int):
    shared = [0.5, 0.7, 1.0, 1.1, 4.0]
    steps = [fractions.Fraction(i, 5) for i in range(6)]
    expected = []
    for k in range(1, replicas + 1):
        tails = [_incomplete_beta(step, k, replicas) for step in steps]
        expected.append(sum(x * float(b - a) for x, a, b in zip(shared, tails, tails[1:], strict=False)))
    assert expected_arrivals([shared] * replicas) == pytest.approx(expected, abs=1e-11)


def test_hundreds_of_replicas_do_not_underflow():
    # Half of their durations are 1 s, half 2 s: for 401 replicas the characteristic function is nearly 1e-800 between.
    found = expected_arrivals([[1.0, 2.0]] * 401)
    assert (found[0], found[200], found[-1]) == pytest.approx((1.0, 1.5, 2.0), abs=1e-9)


# ground_truth: n = 100, k = 90, 95, 96 and 99. The last arrival hangs on a tail that no 400 quantiles hold.
@pytest.mark.parametrize(
    ("law", "published"),
    [
        ("exponential", (2.2584, 2.9040, 3.1040, 4.1874)),
        ("Pareto a=2", (3.1269, 4.3674, 4.8526, 8.8734)),
        ("lognormal s=.25", (1.3679, 1.4905, 1.5269, 1.7161)),
        ("lognormal s=1", (3.5383, 5.0134, 5.5342, 9.0096)),
    ],
)
def test_quantiles_of_a_law_give_its_order_statistics(law: str, published: tuple[float, ...]):
    found = _hundred(law)
    assert [found[k - 1] for k in (90, 95, 96, 99)] == pytest.approx(published, rel=3e-3)


@pytest.mark.parametrize(
    ("law", "shift", "best"),
    [
        ("exponential", 1.0, 31),
        ("exponential", 5.0, 12),
        ("exponential", 10.0, 7),
        ("exponential", 20.0, 4),
        ("lognormal s=.1", 0.0, 4),
        ("lognormal s=.25", 0.0, 13),
        ("lognormal s=.5", 0.0, 30),
    ],
)
def test_the_best_number_of_spares_is_the_published_one(law: str, shift: float, best: int):
    found = _hundred(law, size=200)
    assert max(range(100), key=lambda spares: (100 - spares) / (shift + found[99 - spares])) == best


@pytest.mark.parametrize("samples", [[], [[]], [[1.0], []]])
def test_a_replica_without_samples_is_refused(samples: list[list[float]]):
    with pytest.raises(ValueError, match=r"each replica needs a sample\. Received: "):
        expected_arrivals(samples)
