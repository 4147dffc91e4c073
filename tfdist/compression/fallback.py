# SPDX-License-Identifier: Apache-2.0
"""The functions of _native.c in NumPy, bit for bit, for installations without a compiler."""

from __future__ import annotations

import numpy as np

# Values per chunk: chunks of a few temporary arrays stay in the cache.
CHUNK = 1 << 16


class NumpyKernels:
    """Loops over values, and Golomb-Rice coding, in NumPy. Same results as `tfdist.compression.native.NativeKernels`.

    Entries are int64, 2 * position + (1 if negative), in ascending order.
    """

    name = "numpy"

    def add(
        self, a: np.ndarray, b: np.ndarray, out: np.ndarray, bound: float, first: int, entries: np.ndarray
    ) -> int | None:
        """Computes out = a + b, and the entries where |out| > bound.

        Args:
          a: float32 [size].
          b: float32 [size].
          out: float32 [size]; overlaps neither `a` nor `b`.
          bound: a float32.
          first: position of a[0] among the values of a step.
          entries: int64 [capacity], takes the first entries.

        Returns:
          The number of entries, of which those beyond the capacity are not written; None if a sum is not finite.
        """
        with np.errstate(all="ignore"):
            np.add(a, b, out=out)
        return self._find(out, bound, first, entries)

    def correct(
        self,
        velocity: np.ndarray,
        accumulated: np.ndarray,
        gradient: np.ndarray,
        momentum: float,
        new_velocity: np.ndarray,
        out: np.ndarray,
        bound: float,
        first: int,
        entries: np.ndarray,
    ) -> int | None:
        """Computes new_velocity = momentum * velocity + gradient, out = accumulated + new_velocity; else as `add`."""
        with np.errstate(all="ignore"):
            np.multiply(velocity, np.float32(momentum), out=new_velocity)
            np.add(new_velocity, gradient, out=new_velocity)
            np.add(accumulated, new_velocity, out=out)
        return self._find(out, bound, first, entries)

    def scatter(self, values: np.ndarray, first: int, entries: np.ndarray, value: float) -> None:
        """Adds a value where an entry is positive, and subtracts it where it is negative.

        Args:
          values: float32 [size], changed in place.
          first: position of values[0] among the values of a step.
          entries: int64 [count], ascending, all within `values`.
          value: a float32.
        """
        # The positions are distinct.
        values[(entries >> 1) - first] += np.where(entries & 1, np.float32(-value), np.float32(value))

    def take_signs(self, values: np.ndarray, scale: float) -> np.ndarray:
        """Subtracts the signs of values times a scale, in place.

        Args:
          values: float32 [size], changed in place.
          scale: a float32 that is not negative.

        Returns:
          The sign bits, uint8 [(size + 7) // 8], the lowest bit of a byte first.
        """
        bits = np.packbits(np.signbit(values), bitorder="little")
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            part -= np.copysign(np.float32(scale), part)
        return bits

    def add_signs(self, values: np.ndarray, scale: float, bits: np.ndarray) -> None:
        """Adds signs times a scale to float32 [size], in place.

        Args:
          values: float32 [size], changed in place.
          scale: a float32.
          bits: result of `take_signs`.
        """
        # Eight values of each byte.
        eight = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.float32) * np.float32(scale)
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            part += eight[bits[start // 8 : (start + CHUNK) // 8]].reshape(-1)[: part.size]

    def zeros(self, entries: np.ndarray, k: int) -> int:
        """Returns the sum of gap >> k over all entries."""
        return int((gaps_of(entries) >> k).sum())

    def encode(
        self, entries: np.ndarray, k: int, signs: np.ndarray | None, remainders: np.ndarray, unary: np.ndarray
    ) -> None:
        """Writes three bit streams, the lowest bit of a byte first: signs, remainders of k bits, and quotients.

        Args:
          entries: int64 [count].
          k: bits of a remainder.
          signs: zeroed uint8, or None.
          remainders: zeroed uint8.
          unary: zeroed uint8; as many zeros as the quotient says precede each one.
        """
        gaps = gaps_of(entries)
        if signs is not None:
            _pack(signs, (entries & 1).astype(np.uint8))
        _pack(remainders, ((gaps[:, None] >> np.arange(k)) & 1).astype(np.uint8))
        ends = np.cumsum((gaps >> k) + 1)
        bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
        bits[ends - 1] = 1
        _pack(unary, bits)

    def decode(
        self, signs: np.ndarray | None, remainders: np.ndarray, unary: np.ndarray, count: int, k: int, size: int
    ) -> np.ndarray:
        """Reads `count` entries from the streams of `encode`.

        Raises:
          ValueError: the streams are too short or too long, or an entry is not below `size`.
        """
        ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
        if len(ones) < count:
            raise ValueError("the quotients end before the last entry")
        quotients = np.diff(ones[:count], prepend=-1) - 1
        # Before the shift, which might overflow.
        if count and int(quotients.max()) > size >> k:
            raise ValueError("an entry is beyond the last value")
        rests = np.unpackbits(remainders, count=count * k, bitorder="little").reshape(count, k)
        rest = (rests.astype(np.int64) << np.arange(k)).sum(1, dtype=np.int64)
        steps = (quotients << k) + rest + 1
        # Sums of many large gaps could overflow int64; those of float64 can't.
        if count and float(steps.sum(dtype=np.float64)) > 2.0 * size + 2:
            raise ValueError("an entry is beyond the last value")
        positions = np.cumsum(steps) - 1
        if count and int(positions[-1]) >= size:
            raise ValueError("an entry is beyond the last value")
        if len(ones) > count or len(unary) != (int(ones[-1]) + 8 >> 3 if count else 0):
            raise ValueError("bytes follow the last entry")
        negative = 0 if signs is None else np.unpackbits(signs, count=count, bitorder="little")
        return positions * 2 + negative

    def _find(self, values: np.ndarray, bound: float, first: int, entries: np.ndarray) -> int | None:
        count = 0
        limit = np.float32(bound)
        for start in range(0, values.size, CHUNK):
            magnitudes = np.abs(values[start : start + CHUNK])
            if not np.isfinite(magnitudes.max()):
                return None
            found = np.flatnonzero(magnitudes > limit)
            kept = found[: max(0, entries.size - count)] + start
            entries[count : count + kept.size] = (kept + first) * 2 + np.signbit(values[kept])
            count += found.size
        return count


def gaps_of(entries: np.ndarray) -> np.ndarray:
    """Returns the number of values between each entry and the one before it, int64."""
    return np.diff(entries >> 1, prepend=-1) - 1


def _pack(into: np.ndarray, bits: np.ndarray) -> None:
    packed = np.packbits(bits.reshape(-1), bitorder="little")
    into[: packed.size] = packed
