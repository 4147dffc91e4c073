# SPDX-License-Identifier: Apache-2.0
"""Frames: what was built is parsed, and no damage passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.compression import frames

LAYOUT = frames.FrameLayout.of([3, 0, 7])


def test_layouts_tell_tensors_of_other_shapes_apart():
    assert frames.FrameLayout.of([3, 7]) != frames.FrameLayout.of([7, 3])
    assert frames.FrameLayout.of([3, 7]).num_values == 10
    assert frames.FrameLayout.of([2**40]).num_values == 2**40


def test_a_frame_is_parsed_with_padding_behind_it():
    frame = frames.build(5, 2, LAYOUT, [b"ab", np.array([1, 2], np.uint8)])
    assert frame.size == frames.HEADER_BYTES + 4 == 36
    for padding in (0, 1, 100):
        flags, payload = frames.parse(np.pad(frame, (0, padding), constant_values=7), 5, LAYOUT)
        assert (flags, payload.tobytes()) == (2, b"ab\x01\x02")


@settings(deadline=None, derandomize=True)
@given(payload=st.binary(max_size=50), bit=st.integers(0))
def test_each_flipped_bit_is_found(payload: bytes, bit: int):
    frame = frames.build(1, 0, LAYOUT, [payload])
    bit %= 8 * frame.size
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"truncated|checksum|does not begin"):
        frames.parse(frame, 1, LAYOUT)


@settings(deadline=None, derandomize=True)
@given(payload=st.binary(max_size=50), length=st.integers(0))
def test_each_truncation_is_found(payload: bytes, length: int):
    frame = frames.build(1, 0, LAYOUT, [payload])
    with pytest.raises(ValueError, match="truncated"):
        frames.parse(frame[: length % frame.size], 1, LAYOUT)


@settings(deadline=None, derandomize=True)
@given(data=st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(data: bytes):
    with pytest.raises(ValueError):
        frames.parse(np.frombuffer(data, np.uint8), 1, LAYOUT)


def test_frames_of_other_codecs_and_tensors_are_refused():
    frame = frames.build(1, 0, LAYOUT, [])
    with pytest.raises(ValueError, match="another codec"):
        frames.parse(frame, 2, LAYOUT)
    with pytest.raises(ValueError, match="other tensors: 10 values against 4"):
        frames.parse(frame, 1, frames.FrameLayout.of([4]))
    with pytest.raises(ValueError, match="other shapes"):
        frames.parse(frame, 1, frames.FrameLayout.of([10]))
