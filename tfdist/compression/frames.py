# SPDX-License-Identifier: Apache-2.0
"""Frames of messages: a header of 16 bytes with a checksum, and a payload.

| bytes | field |
|---|---|
| 8 | length of the payload |
| 4 | flags |
| 4 | CRC32 of both and of the payload, which begins with that of the codec and of the sizes of the tensors |

All numbers are little-endian. The checksum is wrong in a damaged message, and in a message of another codec, of other
tensors or of another version of the format.
"""

from __future__ import annotations

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


def decode(data: np.ndarray, count: int, has_signs: bool) -> np.ndarray:
    """Decodes what `encode` returned, uint8, of so many entries.

    Returns:
      int64 [count]; without signs all entries are positive.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    k = int(data[0])
    lengths = [-(-bits // 8) for bits in (count * has_signs, count * k)]
    signs, remainders, unary = np.split(data[1:], np.cumsum(lengths))
    quotients = np.diff(np.flatnonzero(np.unpackbits(unary, bitorder="little")), prepend=-1) - 1
    bits_of = np.unpackbits(remainders, count=count * k, bitorder="little").reshape(count, k).astype(np.int64)
    gaps = (quotients << k) + (bits_of << np.arange(k)).sum(1, dtype=np.int64)
    negative = np.unpackbits(signs, count=count, bitorder="little") if has_signs else 0
    return (np.cumsum(gaps + 1) - 1) * 2 + negative


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
_VERSION = 2
_FIELDS, _CHECKSUM = struct.Struct("<QI"), struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


def origin_of(codec: str, sizes: Sequence[int]) -> int:
    """Returns the CRC32 of a codec, by its name, and of the number of values of each tensor."""
    return zlib.crc32(f"{_VERSION} {codec} {[*sizes]}".encode())


def build(origin: int, flags: int, payload: Sequence[bytes | np.ndarray]) -> np.ndarray:
    """Builds a frame.

    Args:
      origin: see `origin_of`.
      flags: 32 bits.
      payload: bytes, and arrays of uint8, one behind the other.

    Returns:
      uint8.
    """
    body = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in payload]
    fields = _FIELDS.pack(sum(part.size for part in body), flags)
    frame = np.concatenate([np.zeros(HEADER_BYTES, np.uint8), *body])
    checksum = zlib.crc32(frame[HEADER_BYTES:].data, zlib.crc32(fields, origin))
    frame[:HEADER_BYTES] = np.frombuffer(fields + _CHECKSUM.pack(checksum), np.uint8)
    return frame


def parse(row: np.ndarray, origin: int, sender: str) -> tuple[int, np.ndarray]:
    """Checks a frame.

    Args:
      row: uint8 [capacity]; what follows the frame is ignored.
      origin: of the receiver's codec and tensors.
      sender: its name.

    Returns:
      The flags and the payload, uint8.

    Raises:
      ValueError: the frame is truncated or damaged, or is of another codec or of other tensors.
    """
    fields, found = row[: _FIELDS.size].tobytes(), row[_FIELDS.size : HEADER_BYTES].tobytes()
    if len(found) == _CHECKSUM.size:
        length, flags = _FIELDS.unpack(fields)
        payload = row[HEADER_BYTES:][:length]
        if found == _CHECKSUM.pack(zlib.crc32(payload.data, zlib.crc32(fields, origin))):
            return flags, payload
    raise ValueError(
        f"the message of {sender} can't be decoded: it was damaged on the way, or is of another codec, other tensors "
        "or another version of tfdist; use the same on all workers"
    )
