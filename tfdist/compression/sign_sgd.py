# SPDX-License-Identifier: Apache-2.0
"""Signs with error feedback: one bit per value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.compression import frames, gathered


@dataclasses.dataclass(frozen=True, repr=False)
class SignSGD(gathered.GatheredCodec):
    """Sends the sign of each value, and the mean magnitude of each tensor.

    With gradient g and residual e of d values: p = g + e; delta = (|p|_1 / d) sign(p) is sent, and e = p - delta. A
    zero is sent as a positive value. Source: Karimireddy, Rebjock, Stich and Jaggi 2019, Error feedback fixes SignSGD,
    arXiv 1901.09847, algorithm 1. The learning rate scales the gradient behind the codec instead of before.

    State: `residual/i` per tensor (float32).
    """

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        return gathered.per_tensor("residual", specs)

    def _encode_arrays(self, gradients: Sequence[np.ndarray], state: gathered.Arrays) -> gathered.Encoded | None:
        new: gathered.Arrays = {}
        scales, signs = [], []
        for index, gradient in enumerate(gradients):
            name = f"residual/{index}"
            values = frames.empty(gradient.size)
            add = gathered.adding(state[name], gradient, values)
            if gathered.compute_and_find(values, add, gathered.LARGEST, np.zeros(0, np.int64)) is None:
                return None
            scale = _mean_magnitude(values)
            signs.append(_take_signs(values, scale))
            new[name] = values
            scales.append(scale)
        return 0, [np.array(scales, "<f4").view(np.uint8), *signs], new

    def _add_payload(self, flags: int, payload: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        scales, data = np.split(payload, [4 * len(sums)])
        # Eight values of each byte.
        signs = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.float32)
        gathered.add_bytes(data, [scale * signs for scale in np.frombuffer(scales.tobytes(), "<f4")], sums)


def _take_signs(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """Subtracts signs times a scale from values; returns the sign bits, uint8, the lowest bit of a byte first."""
    bits = [np.zeros(0, np.uint8)]
    for start in range(0, values.size, gathered.CHUNK):
        part = values[start : start + gathered.CHUNK]
        bits.append(np.packbits(np.signbit(part), bitorder="little"))
        part -= np.copysign(scale, part)
    return np.concatenate(bits)


def _mean_magnitude(values: np.ndarray) -> np.float32:
    """Returns the mean magnitude, summed in one order."""
    total = 0.0
    for start in range(0, values.size, gathered.CHUNK):
        magnitudes = np.abs(values[start : start + gathered.CHUNK])
        with np.errstate(over="ignore"):
            part = float(magnitudes.sum())
        # Sums in float32 are faster, and overflow near its limit.
        total += part if math.isfinite(part) else float(magnitudes.sum(dtype=np.float64))
    return np.float32(total / max(1, values.size))
