# SPDX-License-Identifier: Apache-2.0
"""Golomb-Rice coding: sizes against the entropy, and data that no encoder has written."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from entropy import entropy_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist.compression import frames

_POSITIONS = st.sets(st.integers(0, 2**45), max_size=40) | st.sets(st.integers(0, 200), max_size=150)
_SETTINGS = settings(deadline=None, derandomize=True, max_examples=150)


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


@_SETTINGS
@given(positions=_POSITIONS, signs=st.integers(0), has_signs=st.booleans())
@example(positions=set(), signs=0, has_signs=True)
@example(positions={0}, signs=1, has_signs=True)
@example(positions={2**61}, signs=0, has_signs=True)
def test_decoding_returns_what_was_encoded(positions: set[int], signs: int, has_signs: bool):
    entries = np.array([2 * p + (signs >> i & has_signs) for i, p in enumerate(sorted(positions))], np.int64)
    size = int(entries[-1] >> 1) + 1 if entries.size else 0
    coded = frames.encode(entries, has_signs)
    np.testing.assert_array_equal(frames.decode(coded, entries.size, has_signs, size), entries)
    for wrong in (size - 1, 0) if entries.size else ():
        with pytest.raises(ValueError, match=r"entry|entries"):
            frames.decode(coded, entries.size, has_signs, wrong)


def test_k_gives_the_fewest_bits():
    rng = np.random.default_rng(1)
    for scale in (1, 3, 50, 4000):
        entries = np.cumsum(rng.integers(1, 2 + scale ** rng.integers(1, 3, 300))) * 2
        positions = np.diff(entries >> 1, prepend=-1) - 1
        best = min(300 * (k + 1) + int((positions >> k).sum()) for k in range(50))
        assert frames.encode(entries, False).size <= 1 + math.ceil(best / 8) + 1


@_SETTINGS
@given(data=st.binary(max_size=60), count=st.integers(0, 80), has_signs=st.booleans(), size=st.integers(0, 2**40))
def test_arbitrary_bytes_are_refused_or_valid(data: bytes, count: int, has_signs: bool, size: int):
    with contextlib.suppress(ValueError):
        positions = frames.decode(np.frombuffer(data, np.uint8), count, has_signs, size) >> 1
        assert len(positions) == count and (np.diff(positions) > 0).all()
        assert not count or 0 <= positions[0] <= positions[-1] < size


@_SETTINGS
@given(flips=st.lists(st.integers(0, 8 * 400), min_size=1, max_size=5), cut=st.integers(0, 30))
def test_damaged_codes_are_refused_or_valid(flips: list[int], cut: int):
    entries = random_entries(20_000, 0.01)
    data = frames.encode(entries, True)
    for flip in flips:
        data[flip // 8 % data.size] ^= 1 << flip % 8
    with contextlib.suppress(ValueError):
        positions = frames.decode(data[: data.size - cut], entries.size, True, 20_000) >> 1
        assert (np.diff(positions) > 0).all() and 0 <= positions[0] <= positions[-1] < 20_000


def test_a_wrong_number_of_entries_allocates_nothing():
    with pytest.raises(ValueError, match="don't fit"):
        frames.decode(np.ones(10, np.uint8), 2**60, True, 2**62)
