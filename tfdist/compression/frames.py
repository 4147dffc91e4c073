# SPDX-License-Identifier: Apache-2.0
"""Frames of messages: a header of 32 bytes with a checksum, and a payload.

| bytes | field |
|---|---|
| 4 | magic, `tfdC` |
| 1 | version of the format |
| 1 | number of the codec |
| 2 | flags |
| 8 | length of the payload |
| 8 | number of values of all tensors |
| 4 | CRC32 of the sizes of the tensors |
| 4 | CRC32 of the frame, with zeros in this place |

All numbers are little-endian. Receivers know the tensors, so a checksum of their sizes takes the place of the sizes:
a message of sparse entries may be shorter than a list of them.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Sequence

import numpy as np

# A gradient of the sender was not finite. The frame has no payload.
NON_FINITE = 1
_MAGIC, _VERSION = b"tfdC", 1
_HEADER = struct.Struct("<4sBBHQQII")
HEADER_BYTES = _HEADER.size
_CHECKSUM_AT = HEADER_BYTES - 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Number of values in all tensors of a step, and a checksum of the number in each."""

    num_values: int
    checksum: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Returns the layout of tensors of these sizes."""
        return cls(sum(sizes), zlib.crc32(struct.pack(f"<{len(sizes)}Q", *sizes)))


def build(codec: int, flags: int, layout: Layout, payload: Sequence[bytes | np.ndarray]) -> np.ndarray:
    """Builds a frame.

    Args:
      codec: number of the codec, 0 to 255.
      flags: 16 bits.
      layout: that of the sender's tensors.
      payload: bytes, and arrays of uint8, one behind the other.

    Returns:
      uint8.
    """
    body = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in payload]
    length = sum(part.size for part in body)
    header = _HEADER.pack(_MAGIC, _VERSION, codec, flags, length, layout.num_values, layout.checksum, 0)
    frame = np.concatenate([np.frombuffer(header, np.uint8), *body])
    frame[_CHECKSUM_AT:HEADER_BYTES] = np.frombuffer(struct.pack("<I", zlib.crc32(frame.data)), np.uint8)
    return frame


def parse(row: np.ndarray, codec: int, layout: Layout) -> tuple[int, np.ndarray]:
    """Checks a frame.

    Args:
      row: uint8 [capacity]; what follows the frame is ignored.
      codec: number of the codec that the receiver uses.
      layout: that of the receiver's tensors.

    Returns:
      The flags and the payload, uint8.

    Raises:
      ValueError: the frame is truncated or damaged, or is of another codec or of other tensors.
    """
    if row.size < HEADER_BYTES:
        raise ValueError(f"it is truncated: {row.size} bytes, of {HEADER_BYTES} of the header")
    header = row[:HEADER_BYTES].copy()
    magic, version, sent_codec, flags, length, num_values, sizes, checksum = _HEADER.unpack(header.tobytes())
    if magic != _MAGIC:
        raise ValueError("it does not begin like a message of tfdist.compression")
    if length > row.size - HEADER_BYTES:
        raise ValueError(f"it is truncated: {row.size - HEADER_BYTES} bytes of a payload of {length}")
    payload = row[HEADER_BYTES : HEADER_BYTES + length]
    header[_CHECKSUM_AT:] = 0
    # Before the other fields, which differ in a damaged frame, too.
    if zlib.crc32(payload.data, zlib.crc32(header.data)) != checksum:
        raise ValueError("it was damaged on the way: its checksum is wrong")
    if version != _VERSION:
        raise ValueError(f"it has version {version} of the format, and this is {_VERSION}; use one version of tfdist")
    if sent_codec != codec:
        raise ValueError("it was encoded by another codec; use one codec on all workers")
    if Layout(num_values, sizes) != layout:
        raise ValueError(
            f"it is of other tensors: {num_values} values against {layout.num_values}, or of other shapes; use one "
            "model on all workers"
        )
    if flags & NON_FINITE and length:
        raise ValueError("it has a payload and says that its gradient was not finite")
    return flags, payload
