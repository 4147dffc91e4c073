# SPDX-License-Identifier: Apache-2.0
"""Deep Gradient Compression: the largest values, with momentum correction."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfdist import _checks
from tfdist.compression import codec, frames, gathered

# Number of entries, bytes of the coded gaps, bytes per value.
_HEAD = struct.Struct("<QQB")
_DTYPES = {"float16": np.float16, "float32": np.float32}
# Density of the first step of the warmup: a quarter of the values, as in the paper.
_FIRST_DENSITY = 0.25
_MIN_SAMPLE, _MAX_SAMPLE = 1 << 12, 1 << 18
_BELOW_SMALLEST = float(np.nextafter(np.float32(gathered.SMALLEST), np.float32(0)))


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(gathered.GatheredCodec):
    """Sends the values of largest magnitude of each tensor, and accumulates the rest.

    With gradient g, velocity u and accumulated gradient v: u = momentum * u + g; v += u. The k = density * size largest
    |v_i| of each tensor, one at least, are sent; v_i and u_i become 0 there (momentum correction and factor masking).
    Source: Lin, Han, Mao, Wang and Dally 2018, Deep Gradient Compression, arXiv 1712.01887, algorithm 4.

    The momentum takes the place of the optimizer's: use plain SGD behind it, or momentum=0.

    Unlike the paper, k is exact. A sample gives a bound that more than k values exceed; one pass finds these values,
    and the k largest are selected among them. Of equal magnitudes the first are sent, and zeros never.

    State: `residual/i` (v, float32) and, with momentum, `velocity/i` (u, float32) per tensor, and `step` (int64).

    Args:
      density: fraction of the values to send, in (0, 1].
      warmup: number of steps in which the density falls exponentially from 0.25 to `density`.
      momentum: 0 for none; then v is a plain residual.
      values: "float32", or "float16": the rounding error of a value stays in v, as does its excess over 65504.

    Raises:
      ValueError: an argument is out of range.
    """

    density: float
    warmup: int = 0
    momentum: float = 0.9
    values: str = "float32"

    unsent: ClassVar[tuple[str, ...]] = ("residual", "velocity")

    def __post_init__(self) -> None:
        codec.check_fraction("TopK", "density", self.density)
        if not _checks.is_count(self.warmup, at_least=0):
            raise ValueError(f"TopK(warmup=...) must be a number of steps, or 0. Received: warmup={self.warmup!r}")
        if not _checks.is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"TopK(momentum=...) must be in [0, 1). Received: momentum={self.momentum!r}")
        if self.values not in _DTYPES:
            raise ValueError(f'TopK(values=...) must be "float32" or "float16". Received: values={self.values!r}')

    def density_of(self, step: int) -> float:
        """Returns the fraction of the values that is sent in a step, counted from 0."""
        if step >= self.warmup or self.density >= _FIRST_DENSITY:
            return self.density
        return _FIRST_DENSITY * (self.density / _FIRST_DENSITY) ** (step / self.warmup)

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        velocity = gathered.per_tensor("velocity", specs) if self.momentum else {}
        return {**gathered.per_tensor("residual", specs), **velocity, "step": tf.TensorSpec([], tf.int64)}

    def _encode_arrays(self, gradients: Sequence[np.ndarray], state: gathered.Arrays) -> gathered.Encoded | None:
        density = self.density_of(int(state["step"][0]))
        new: gathered.Arrays = {}
        entries, values, first = [np.zeros(0, np.int64)], [np.zeros(0, _DTYPES[self.values])], 0
        for index, gradient in enumerate(gradients):
            names = [f"residual/{index}", *([f"velocity/{index}"] if self.momentum else [])]
            selected = self._select([state[name] for name in names], gradient, density)
            if selected is None:
                return None
            positions, sent, *kept = selected
            new.update(zip(names, kept, strict=True))
            entries.append((positions + first) * 2)
            values.append(sent)
            first += gradient.size
        found, sent = np.concatenate(entries), np.concatenate(values)
        coded = frames.encode(found, has_signs=False)
        head = _HEAD.pack(found.size, coded.size, sent.itemsize)
        new["step"] = state["step"] + 1
        data = sent.astype(sent.dtype.newbyteorder("<")).view(np.uint8)
        return 0, [head, coded, data], {name: new[name] for name in state}

    def _select(self, old: Sequence[np.ndarray], gradient: np.ndarray, density: float) -> tuple[np.ndarray, ...] | None:
        """Returns the positions and values to send of a tensor, and its new state; None if a value is not finite."""
        size = gradient.size
        number = min(size, max(1, round(density * size)))
        bound = self._bound(old, gradient, number)
        # As many as the sample promises, and some more.
        candidates = np.empty(min(size, 4 * number + _MIN_SAMPLE), np.int64)
        kept = [frames.empty(size) for _ in old]

        def accumulate(chunk: slice) -> None:
            change = gradient[chunk]
            for velocity, new in zip(old[1:], kept[1:], strict=True):
                np.multiply(velocity[chunk], np.float32(self.momentum), out=new[chunk])
                change = np.add(new[chunk], change, out=new[chunk])
            np.add(old[0][chunk], change, out=kept[0][chunk])

        count = gathered.compute_and_find(kept[0], accumulate, bound, candidates)
        if count is None:
            return None
        is_enough = number <= count <= candidates.size
        positions = _largest(kept[0], candidates[:count] >> 1 if is_enough else np.arange(size), number)
        values = kept[0][positions]
        dtype = _DTYPES[self.values]
        largest = float(np.finfo(dtype).max)
        sent = np.clip(values, -largest, largest).astype(dtype)
        kept[0][positions] = values - sent.astype(np.float32)
        for velocity in kept[1:]:
            velocity[positions] = 0
        return positions, sent, *kept

    def _bound(self, old: Sequence[np.ndarray], gradient: np.ndarray, number: int) -> float:
        """Returns a magnitude that the `number` largest values very probably exceed, and not many more do."""
        size = gradient.size
        # About 32 of the values to send are in the sample.
        stride = size // min(_MAX_SAMPLE, max(_MIN_SAMPLE, 32 * size // max(1, number)))
        if stride < 2:
            return _BELOW_SMALLEST
        # Odd, because rows of matrices have even lengths.
        every = slice(None, None, stride | 1)
        with np.errstate(all="ignore"):
            moved = gradient[every] + (np.float32(self.momentum) * old[1][every] if self.momentum else 0)
            sample = np.abs(old[0][every] + moved)
        # Four standard deviations more than the expected number.
        expected = number / size * sample.size
        rank = sample.size - math.ceil(expected + 4 * math.sqrt(expected) + 4)
        bound = float(np.partition(sample, rank)[rank]) if rank >= 0 else 0.0
        return max(bound, _BELOW_SMALLEST) if bound <= gathered.LARGEST else gathered.LARGEST

    def _add_payload(self, flags: int, payload: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        count, coded_size, value_size = _HEAD.unpack(payload[: _HEAD.size].tobytes())
        coded, data = np.split(payload[_HEAD.size :], [coded_size])
        values = np.frombuffer(data.tobytes(), f"<f{value_size}").astype(np.float32)
        gathered.add_at(frames.decode(coded, count, has_signs=False), values, sums)


def _largest(values: np.ndarray, candidates: np.ndarray, number: int) -> np.ndarray:
    """Returns the candidates of the largest magnitudes, ascending; the first of equal ones, and no zeros."""
    magnitudes = np.abs(values[candidates])
    rank = candidates.size - number
    limit = np.partition(magnitudes, rank)[rank] if 0 <= rank < candidates.size else np.float32(0)
    if limit < gathered.SMALLEST:
        return candidates[magnitudes >= gathered.SMALLEST]
    is_above = magnitudes > limit
    equal = np.flatnonzero(magnitudes == limit)
    is_above[equal[: number - np.count_nonzero(is_above)]] = True
    return candidates[is_above]
