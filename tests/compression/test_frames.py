# SPDX-License-Identifier: Apache-2.0
"""Frames: what was built is parsed, and no damage passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
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
