# SPDX-License-Identifier: Apache-2.0
"""Expected k-th arrivals are close to exact means, and to the published values of the laws."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from tfdist.policies.backup_workers import best_spares, expected_arrivals

_NORMAL = statistics.NormalDist().inv_cdf
_QUANTILES = {
    "exponential": lambda u: -math.log1p(-u),
    "Pareto a=2": lambda u: (1 - u) ** -0.5,
    "lognormal s=.1": lambda u: math.exp(0.1 * _NORMAL(u)),
    "lognormal s=.25": lambda u: math.exp(0.25 * _NORMAL(u)),
    "lognormal s=.5": lambda u: math.exp(0.5 * _NORMAL(u)),
    "lognormal s=1": lambda u: math.exp(_NORMAL(u)),
}


def _hundred(law: str, size: int, shift: float = 0.0) -> list[list[float]]:
    """Durations of 100 replicas that all draw from the same quantiles of a law."""
    return [[shift + _QUANTILES[law]((i + 0.5) / size) for i in range(size)]] * 100


@pytest.mark.parametrize("samples", [[[1.0, 3.0], [2.0]], [[0.1, 0.2, 0.6], [0.3, 0.5], [0.2, 1.0]]])
def test_expected_arrivals_are_near_the_mean_over_all_draws(samples: list[list[float]]):
    draws = [sorted(draw) for draw in itertools.product(*samples)]
    exact = [statistics.fmean(column) for column in zip(*draws, strict=True)]
    assert expected_arrivals(samples) == pytest.approx(exact, rel=0.03)


def test_replicas_of_one_duration_arrive_exactly_in_their_order():
    assert expected_arrivals([[10.0], [1.0, 1.0], [2.0]]) == [1.0, 2.0, 10.0]


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
    found = expected_arrivals(_hundred(law, 512))
    assert [found[k - 1] for k in (90, 95, 96, 99)] == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(
    ("law", "shift", "best"),
    [
        *(("exponential", shift, best) for shift, best in ((1.0, 31), (5.0, 12), (10.0, 7), (20.0, 4))),
        ("lognormal s=.1", 0.0, 4),
        ("lognormal s=.25", 0.0, 13),
        ("lognormal s=.5", 0.0, 30),
    ],
)
def test_the_best_number_of_spares_is_the_published_one(law: str, shift: float, best: int):
    durations = _hundred(law, 200, shift)
    # From a number that is far off, for which no gain is too small. The rate is flat around its maximum.
    found, secs = best_spares(durations, 100, 99, spares=99)
    assert abs(found - best) <= 2
    assert (100 - best) / secs[best] > 0.995 * (100 - found) / secs[found]
