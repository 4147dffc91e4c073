# SPDX-License-Identifier: Apache-2.0
"""Frames are parsed, and no damage passes; the size of coded gaps is that of the entropy, almost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from entropy import entropy_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist.compression import frames

ORIGIN = frames.origin_of("TopK", [3, 0, 7])


def refused(row: np.ndarray, origin: int = ORIGIN) -> None:
    with pytest.raises(
        ValueError, match="the message of worker:1 can't be decoded: it was damaged on the way, or is of"
    ):
        frames.parse(row, origin, "worker:1")


def test_a_frame_is_parsed_with_padding_behind_it():
    frame = frames.build(ORIGIN, 2, [b"ab", np.array([1, 2], np.uint8)])
    assert frame.size == frames.HEADER_BYTES + 4 == 20
    for padding in (0, 1, 100):
        flags, payload = frames.parse(np.pad(frame, (0, padding), constant_values=7), ORIGIN, "worker:1")
        assert (flags, payload.tobytes()) == (2, b"ab\x01\x02")


@settings(deadline=None, derandomize=True)
@given(payload=st.binary(max_size=50), place=st.integers(0))
def test_each_flipped_bit_and_each_truncation_is_found(payload: bytes, place: int):
    frame = frames.build(ORIGIN, 0, [payload])
    refused(frame[: place % frame.size])
    bit = place % (8 * frame.size)
    frame[bit // 8] ^= 1 << bit % 8
    refused(frame)


@settings(deadline=None, derandomize=True)
@given(data=st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(data: bytes):
    refused(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("other", [("SignSGD", [3, 0, 7]), ("TopK", [10]), ("TopK", [3, 7]), ("TopK", [7, 0, 3])])
def test_frames_of_other_codecs_and_tensors_are_refused(other: tuple[str, list[int]]):
    refused(frames.build(ORIGIN, 0, []), frames.origin_of(*other))


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
