# SPDX-License-Identifier: Apache-2.0
"""Delay distributions: means, tails, reproducible draws and the JSON form."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.planning.simulation import delay_distributions as distributions

MEANS = st.floats(1e-3, 1e3)
ANY_DISTRIBUTION = st.one_of(
    st.builds(distributions.constant, st.floats(0, 1e3)),
    st.builds(distributions.lognormal, MEANS, st.floats(0, 2)),
    st.builds(distributions.pareto, MEANS, st.floats(1.1, 10)),
    st.builds(distributions.stalls, st.floats(0, 1e3), st.integers(1, 50)),
)
NUMBERS = st.integers(0, 10**6)
COUNT = 20_000
FROM_DICT = distributions.DelayDistribution.from_dict


def _draws(distribution: distributions.DelayDistribution, seed: int = 0) -> list[float]:
    return [distribution.draw(seed, attempt % 8, attempt // 8) for attempt in range(COUNT)]


@pytest.mark.parametrize(
    ("distribution", "mean", "tolerance"),
    [
        (distributions.constant(0.3), 0.3, 1e-9),
        (distributions.lognormal(0.2, 0.5), 0.2, 0.02),
        (distributions.lognormal(0.2, 1.0), 0.2, 0.05),
        (distributions.pareto(0.2, 3.0), 0.2, 0.05),
        (distributions.pareto(0.2, 2.0), 0.2, 0.10),
        (distributions.stalls(0.5, 5), 0.1, 1e-9),
    ],
    ids=str,
)
def test_the_mean_is_the_one_asked_for(distribution, mean, tolerance) -> None:
    assert statistics.fmean(_draws(distribution)) == pytest.approx(mean, rel=tolerance)


def _lognormal_above(x: float) -> float:
    """Of mean 1 and s = 1: P(X > x), where ln X is normal with mean -1/2."""
    return 0.5 * math.erfc((math.log(x) + 0.5) / math.sqrt(2))


@pytest.mark.parametrize(
    ("distribution", "above"),
    [
        (distributions.pareto(1.0, 2.0), lambda x: min(1.0, (0.5 / x) ** 2)),
        (distributions.lognormal(1.0, 1.0), _lognormal_above),
    ],
    ids=["pareto", "lognormal"],
)
@pytest.mark.parametrize("x", [0.3, 0.6, 1.0, 2.0, 5.0])
def test_the_tail_is_that_of_the_distribution(distribution, above, x) -> None:
    share = sum(secs > x for secs in _draws(distribution)) / COUNT
    # Four standard deviations of a share of so many.
    assert share == pytest.approx(above(x), abs=4 * 0.5 / math.sqrt(COUNT))


def test_replicas_attempts_and_seeds_draw_apart() -> None:
    distribution = distributions.lognormal(1.0, 1.0)
    places = [(seed, replica, attempt) for seed in range(3) for replica in range(12) for attempt in range(12)]
    assert len({distribution.draw(*place) for place in places}) == len(places)


def test_a_draw_is_the_same_for_ever() -> None:
    """Delays of published results come back, in whichever process."""
    assert distributions.lognormal(1.0, 1.0).draw(0, 1, 2) == pytest.approx(3.3508997562515184, rel=1e-12)
    assert distributions.pareto(1.0, 2.0).draw(7, 3, 100) == pytest.approx(0.6704097958853393, rel=1e-12)


@given(distribution=ANY_DISTRIBUTION, seed=st.integers(), replica=NUMBERS, attempt=NUMBERS)
def test_draws_are_finite_determined_and_survive_json(distribution, seed, replica, attempt) -> None:
    secs = distribution.draw(seed, replica, attempt)
    assert 0 <= secs < math.inf
    again = distributions.DelayDistribution.from_dict(distribution.to_dict())
    assert again == distribution
    assert again.draw(seed, replica, attempt) == secs


@given(every=st.integers(1, 20), first=NUMBERS)
def test_a_stall_comes_every_so_often(every: int, first: int) -> None:
    distribution = distributions.stalls(2.0, every)
    assert [distribution.draw(0, 0, first + k) for k in range(every)].count(2.0) == 1
    assert distribution.draw(0, 0, every - 1) == 2.0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: distributions.constant(-1), "secs=-1"),
        (lambda: distributions.constant(math.inf), "secs=inf"),
        (lambda: distributions.constant(True), "secs=True"),
        (lambda: distributions.lognormal(0, 1), "mean=0"),
        (lambda: distributions.lognormal(1, -0.5), "s=-0.5"),
        (lambda: distributions.lognormal(math.nan, 1), "mean=nan"),
        (lambda: distributions.pareto(1, 1), "a=1"),
        (lambda: distributions.pareto(1, "2"), "a='2'"),
        (lambda: distributions.stalls(1, 0), "every=0"),
        (lambda: distributions.stalls(1, 2.5), "every=2.5"),
        (lambda: FROM_DICT(0.1), "0.1"),
        (lambda: FROM_DICT({}), "constant(secs)"),
        (lambda: FROM_DICT({"distribution": "weibull"}), "weibull"),
        (lambda: FROM_DICT({"distribution": ["constant"]}), "['constant']"),
        (lambda: FROM_DICT({"distribution": "constant"}), "of constant(secs), "),
        (lambda: FROM_DICT({"distribution": "constant", "secs": 1, "s": 2}), "'s': 2"),
        (lambda: FROM_DICT({"distribution": "pareto", "mean": 1, "a": 0.5}), "a=0.5"),
    ],
)
def test_invalid_parameters_and_forms_are_refused(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match="Received: ") as raised:
        make()
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
