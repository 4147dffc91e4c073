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

All numbers are little-endian. Receivers know the tensors, so a checksum takes the place of their sizes: a list of sizes
may be longer than a message of sparse entries.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

# numpy_function passes arrays to TensorFlow without a copy if they are aligned as its own tensors are.
_ALIGNMENT = 64


def empty(size: int) -> np.ndarray:
    """Returns float32 [size] of any content, which TensorFlow takes without a copy."""
    memory = np.empty(4 * size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + 4 * size].view(np.float32)


# Golomb-Rice coding of the gaps between entries, and of their signs.
#
# Of random positions at density p the gaps are geometric, and an entry takes H(p)/p + 1 bits at least, H being the
# binary entropy; Golomb-Rice codes (Rice 1979) stay within 1 % of that at densities from 1e-4 to 1e-2.
#
# Layout: one byte k, the signs (one bit per entry, if there are signs), the remainders gap mod 2^k (k bits each), and
# the quotients gap >> k (as many zeros, then a one). Each of the three streams begins with a byte of its own, and the
# lowest bit of a byte comes first. Separate streams can be decoded by NumPy without a loop over the entries.


# Remainders of so many bits, at any offset in a byte, are in one word of 64 bits.
_MAX_K = 56


def encode(entries: np.ndarray, has_signs: bool) -> np.ndarray:
    """Encodes the gaps of entries.

    Args:
      entries: int64 [count], 2 * position + (1 if negative), of ascending positions.
      has_signs: False to leave out the signs.

    Returns:
      uint8, of the smallest size that any k gives.
    """
    if not entries.size:
        return np.zeros(0, np.uint8)
    gaps = np.diff(entries >> 1, prepend=-1) - 1
    k = _best_k(gaps)
    ends = np.cumsum((gaps >> k) + 1)
    unary = np.zeros(ends[-1], np.uint8)
    unary[ends - 1] = 1
    remainders = ((gaps[:, None] >> np.arange(k)) & 1).astype(np.uint8)
    streams = [*([(entries & 1).astype(np.uint8)] if has_signs else []), remainders.reshape(-1), unary]
    return np.concatenate([np.array([k], np.uint8), *(np.packbits(each, bitorder="little") for each in streams)])


def decode(data: np.ndarray, count: int, has_signs: bool, num_values: int) -> np.ndarray:
    """Decodes what `encode` returned.

    Args:
      data: uint8, from another worker: anything is possible.
      count: number of entries.
      has_signs: as given to `encode`.
      num_values: positions are below it.

    Returns:
      int64 [count]; without signs all entries are positive.

    Raises:
      ValueError: the data is nothing that `encode` returns.
    """
    if count == 0:
        if data.size:
            raise ValueError("bytes follow the last entry")
        return np.zeros(0, np.int64)
    # Each entry takes at least a bit: a wrong number of entries must not allocate memory for them.
    if data.size == 0 or count > min(num_values, 8 * data.size):
        raise ValueError(f"{count} entries don't fit into {data.size} bytes")
    k = int(data[0])
    lengths = [-(-bits // 8) for bits in (count * has_signs, count * k)]
    if k > _MAX_K or sum(lengths) > data.size - 1:
        raise ValueError(f"{count} entries with remainders of {k} bits don't fit into {data.size} bytes")
    signs, remainders, unary = np.split(data[1:], np.cumsum(lengths))
    for stream, bits in ((signs, count * has_signs), (remainders, count * k)):
        if bits % 8 and stream[-1] >> bits % 8:
            raise ValueError("bits are set behind the last entry")
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if len(ones) < count:
        raise ValueError("the quotients end before the last entry")
    if len(ones) > count or len(unary) != int(ones[-1]) // 8 + 1:
        raise ValueError("bytes follow the last entry")
    quotients = np.diff(ones, prepend=-1) - 1
    # Before the shift, which might overflow.
    if int(quotients.max()) > num_values >> k:
        raise ValueError("an entry is beyond the last value")
    bits_of = np.unpackbits(remainders, count=count * k, bitorder="little").reshape(count, k).astype(np.int64)
    steps = (quotients << k) + (bits_of << np.arange(k)).sum(1, dtype=np.int64) + 1
    positions = np.cumsum(steps) - 1
    # Sums of many large gaps could overflow int64; those of float64 can't.
    if float(steps.sum(dtype=np.float64)) > 2.0 * num_values + 2 or int(positions[-1]) >= num_values:
        raise ValueError("an entry is beyond the last value")
    negative = np.unpackbits(signs, count=count, bitorder="little") if has_signs else 0
    return positions * 2 + negative


def _best_k(gaps: np.ndarray) -> int:
    """Returns the k of the fewest bits, the smallest of several."""

    def bits(k: int) -> int:
        return gaps.size * k + int((gaps >> k).sum())

    k = min(_MAX_K, max(0, round(math.log2((float(gaps.mean()) + 1) * math.log(2)))))
    # The bits are a convex function of k.
    best = bits(k)
    while k > 0 and (fewer := bits(k - 1)) <= best:
        k, best = k - 1, fewer
    while k < _MAX_K and (fewer := bits(k + 1)) < best:
        k, best = k + 1, fewer
    return k


# A gradient of the sender was not finite. The frame has no payload.
NON_FINITE = 1
_MAGIC, _VERSION = b"tfdC", 1
_HEADER = struct.Struct("<4sBBHQQII")
HEADER_BYTES = _HEADER.size
_CHECKSUM_AT = HEADER_BYTES - 4


@dataclasses.dataclass(frozen=True)
class FrameLayout:
    """Number of values in all tensors of a step, and a checksum of the number in each."""

    num_values: int
    checksum: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> FrameLayout:
        """Returns the layout of tensors of these sizes."""
        return cls(sum(sizes), zlib.crc32(struct.pack(f"<{len(sizes)}Q", *sizes)))


def build(codec: int, flags: int, layout: FrameLayout, payload: Sequence[bytes | np.ndarray]) -> np.ndarray:
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


def parse(row: np.ndarray, codec: int, layout: FrameLayout) -> tuple[int, np.ndarray]:
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
    if FrameLayout(num_values, sizes) != layout:
        raise ValueError(
            f"it is of other tensors: {num_values} values against {layout.num_values}, or of other shapes; use one "
            "model on all workers"
        )
    if flags & NON_FINITE and length:
        raise ValueError("it has a payload and says that its gradient was not finite")
    return flags, payload
