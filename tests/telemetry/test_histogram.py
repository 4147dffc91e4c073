# SPDX-License-Identifier: Apache-2.0
"""Histograms: percentiles within the documented error, whatever the values; merging adds up; the size is bounded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.telemetry.histogram import LEAST, MOST, RELATIVE_ERROR, Histogram

VALUES = st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=200)


def of(values: list[float]) -> Histogram:
    histogram = Histogram()
    histogram.add_all(np.array(values, np.float64))
    return histogram


@given(VALUES, st.sampled_from([0, 1, 25, 50, 95, 99, 100]))
def test_percentiles_are_within_the_error(values: list[float], percent: float) -> None:
    exact = float(np.percentile(values, percent, method="inverted_cdf"))
    assert of(values).percentile(percent) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)


@given(VALUES, VALUES)
def test_merging_is_adding_all_values(first: list[float], second: list[float]) -> None:
    merged, whole = of(first), of(first + second)
    merged.merge(of(second))
    assert (merged.count, merged.least, merged.most) == (whole.count, whole.least, whole.most)
    assert merged.buckets() == whole.buckets()
    assert merged.mean == pytest.approx(whole.mean) == pytest.approx(math.fsum(first + second) / whole.count)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_its_size_is_bounded_for_any_values(values: list[float]) -> None:
    histogram = of(values)
    assert histogram.count == len(values) == sum(count for _, count in histogram.buckets())
    limits = [limit for limit, _ in histogram.buckets()]
    assert all(0.9 * LEAST <= limit <= 1.1 * MOST for limit in limits)


def test_an_empty_histogram_is_zero() -> None:
    assert (Histogram().percentile(50), Histogram().mean, Histogram().most) == (0.0, 0.0, 0.0)
