# SPDX-License-Identifier: Apache-2.0
"""Golomb-Rice coding: sizes against the entropy, and what comes back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from entropy import entropy_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist.compression import frames

_POSITIONS = st.sets(st.integers(0, 2**45), max_size=40) | st.sets(st.integers(0, 200), max_size=150)


def random_entries(num_values: int, density: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(num_values) < density)
    return positions * 2 + rng.integers(0, 2, positions.size)


def coded_bits(entries: np.ndarray) -> float:
    return 8 * frames.encode(entries, has_signs=True).size / entries.size


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("num_values", [1_000_000, 8_000_000])
def test_coded_size_is_within_2_percent_of_the_entropy(density: float, num_values: int):
    entries = random_entries(num_values, density)
    # The entropy of this number of entries, which differs from num_values * density by chance.
    assert coded_bits(entries) <= 1.02 * entropy_bits(entries.size / num_values)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(positions=_POSITIONS, signs=st.integers(0), has_signs=st.booleans())
@example(positions=set(), signs=0, has_signs=True)
@example(positions={0}, signs=1, has_signs=True)
@example(positions={2**61}, signs=0, has_signs=True)
def test_decoding_returns_what_was_encoded(positions: set[int], signs: int, has_signs: bool):
    entries = np.array([2 * p + (signs >> i & has_signs) for i, p in enumerate(sorted(positions))], np.int64)
    coded = frames.encode(entries, has_signs)
    np.testing.assert_array_equal(frames.decode(coded, entries.size, has_signs), entries)


def test_k_gives_the_fewest_bits():
    rng = np.random.default_rng(1)
    for scale in (1, 3, 50, 4000):
        entries = np.cumsum(rng.integers(1, 2 + scale ** rng.integers(1, 3, 300))) * 2
        positions = np.diff(entries >> 1, prepend=-1) - 1
        best = min(300 * (k + 1) + int((positions >> k).sum()) for k in range(50))
        assert frames.encode(entries, False).size <= 1 + math.ceil(best / 8) + 1
