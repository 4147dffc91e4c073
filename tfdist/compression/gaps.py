# SPDX-License-Identifier: Apache-2.0
"""Golomb-Rice coding of the gaps between entries, and of their signs.

Of random positions at density p the gaps are geometric, and an entry takes H(p)/p + 1 bits at least, H being the binary
entropy; Golomb-Rice codes (Rice 1979) stay within 1 % of that at densities from 1e-4 to 1e-2.

Layout: one byte k, the signs (one bit per entry, if there are signs), the remainders gap mod 2^k (k bits each), and the
quotients gap >> k (as many zeros, then a one). Each of the three streams begins with a byte of its own, and the lowest
bit of a byte comes first. Separate streams can be decoded by NumPy without a loop over the entries.
"""

from __future__ import annotations

import math

import numpy as np

from tfdist.compression import native

# Remainders of so many bits, at any offset in a byte, are in one word of 64 bits.
_MAX_K = 56


def encode(entries: np.ndarray, has_signs: bool, kernels: native.Kernels | None = None) -> np.ndarray:
    """Encodes the gaps of entries.

    Args:
      entries: int64 [count], 2 * position + (1 if negative), of ascending positions.
      has_signs: False to leave out the signs.
      kernels: for tests.

    Returns:
      uint8, of the smallest size that any k gives.
    """
    kernels = kernels or native.kernels()
    count = entries.size
    if count == 0:
        return np.zeros(0, np.uint8)
    k = _best_k(entries, kernels)
    lengths = _lengths(count, k, has_signs)
    data = np.zeros(1 + sum(lengths) + _bytes(count + kernels.zeros(entries, k)), np.uint8)
    data[0] = k
    signs, remainders, unary = np.split(data[1:], np.cumsum(lengths))
    kernels.encode(entries, k, signs if has_signs else None, remainders, unary)
    return data


def decode(
    data: np.ndarray, count: int, has_signs: bool, num_values: int, kernels: native.Kernels | None = None
) -> np.ndarray:
    """Decodes what `encode` returned.

    Args:
      data: uint8, from another worker: anything is possible.
      count: number of entries.
      has_signs: as given to `encode`.
      num_values: positions are below it.
      kernels: for tests.

    Returns:
      int64 [count]; without signs all entries are positive.

    Raises:
      ValueError: the data is nothing that `encode` returns.
    """
    kernels = kernels or native.kernels()
    if count == 0:
        if data.size:
            raise ValueError("bytes follow the last entry")
        return np.zeros(0, np.int64)
    # Each entry takes at least a bit: a wrong number of entries must not allocate memory for them.
    if data.size == 0 or count > min(num_values, 8 * data.size):
        raise ValueError(f"{count} entries don't fit into {data.size} bytes")
    k = int(data[0])
    lengths = _lengths(count, k, has_signs)
    if k > _MAX_K or sum(lengths) > data.size - 1:
        raise ValueError(f"{count} entries with remainders of {k} bits don't fit into {data.size} bytes")
    signs, remainders, unary = np.split(data[1:], np.cumsum(lengths))
    for stream, bits in ((signs, count * has_signs), (remainders, count * k)):
        if bits % 8 and stream[-1] >> bits % 8:
            raise ValueError("bits are set behind the last entry")
    return kernels.decode(signs if has_signs else None, remainders, unary, count, k, num_values)


def entropy_bits(density: float) -> float:
    """Returns the entropy of one gap and its sign at random positions of this density, in bits."""
    if density >= 1:
        return 1.0
    return 1 - math.log2(density) - (1 - density) / density * math.log2(1 - density)


def _best_k(entries: np.ndarray, kernels: native.Kernels) -> int:
    """Returns the k of the fewest bits, the smallest of several."""
    count = entries.size

    def bits(k: int) -> int:
        return count * k + kernels.zeros(entries, k)

    mean = ((int(entries[-1]) >> 1) + 1) / count
    k = min(_MAX_K, max(0, round(math.log2(mean * math.log(2)))))
    # The bits are a convex function of k.
    best = bits(k)
    while k > 0 and (fewer := bits(k - 1)) <= best:
        k, best = k - 1, fewer
    while k < _MAX_K and (fewer := bits(k + 1)) < best:
        k, best = k + 1, fewer
    return k


def _lengths(count: int, k: int, has_signs: bool) -> list[int]:
    """Returns the bytes of the signs and of the remainders."""
    return [_bytes(count * has_signs), _bytes(count * k)]


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
