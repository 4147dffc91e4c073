# SPDX-License-Identifier: Apache-2.0
"""Threshold compression with error feedback."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist import _checks
from tfdist.compression import codec, frames, gathered

_HEAD = struct.Struct("<fQ")
# Flag of a frame: 2 bits per value instead of coded gaps.
_BITMAP = 2
_SAMPLE = 1 << 16
# Factor by which tau adapts in one step: 2 in 20 steps.
_ADAPTATION = 2 ** (1 / 20)
_CLIP = 5
# Beyond this density a bitmap is sent. Coded gaps are never longer, but their entries would take more memory than the
# gradient.
_BITMAP_FROM = 1 / 4


@dataclasses.dataclass(frozen=True, repr=False)
class Threshold(gathered.GatheredCodec):
    """Sends the sign of each value whose magnitude exceeds tau, and keeps the rest.

    With gradient g and residual r: r += g; where |r_i| > tau, +-tau is sent and subtracted from r_i.
    Source: Strom 2015, Scalable distributed DNN training using commodity GPU cloud computing, section 3 (Interspeech).

    State: `residual/i` per tensor (float32), `tau` (float32; 0 until the first value other than 0) and `step` (int64).

    An adaptive tau is at first the magnitude that a fraction sqrt(min_density * max_density) of the first gradient's
    values exceeds. In each step it grows by 2^(1/20) if the density is above `max_density`, and shrinks by as much
    below `min_density`. That is a factor of 2 in 20 steps (Deeplearning4j's AdaptiveThresholdAlgorithm). Each worker
    has a tau of its own, which is sent with the message.

    Gradients that are mostly noise keep the density just below `max_density`. Random entries take 15.8, 12.5 and 9.1
    bits at densities 1e-4, 1e-3 and 1e-2. That is 20000, 2600 and 350 times less than float32; 1000 times less needs
    0.0028.

    Every `clip_every` steps residuals are clipped to +-5 tau, as Deeplearning4j's ResidualClippingPostProcessor does.
    Otherwise the residual of a value that grows faster than tau per step would grow without bound. It would be sent
    long after the gradient has changed its sign. Clipped mass is lost: such a step sends and keeps less than its
    gradient.

    Args:
      tau: above 0, in units of the gradient, which differ between models; or "adaptive".
      min_density: fraction of the values below which an adaptive tau shrinks.
      max_density: fraction of the values above which an adaptive tau grows.
      clip_every: steps between clippings, or None for none.

    Raises:
      ValueError: an argument is out of range.
    """

    tau: float | str = "adaptive"
    min_density: float = 1e-4
    max_density: float = 1e-2
    clip_every: int | None = 5

    def __post_init__(self) -> None:
        is_number = _checks.is_number(self.tau) and gathered.SMALLEST <= self.tau <= gathered.LARGEST
        if not is_number and not (isinstance(self.tau, str) and self.tau == "adaptive"):
            raise ValueError(
                "Threshold(tau=...) must be a positive number in the range of float32, in units of the gradient, or "
                f'"adaptive". Received: tau={self.tau!r}'
            )
        codec.check_fraction("Threshold", "min_density", self.min_density)
        codec.check_fraction("Threshold", "max_density", self.max_density)
        if self.min_density > self.max_density:
            raise ValueError(
                "Threshold(min_density=...) must not exceed max_density. Received: "
                f"min_density={self.min_density!r}, max_density={self.max_density!r}"
            )
        if self.clip_every is not None and not _checks.is_count(self.clip_every):
            raise ValueError(
                "Threshold(clip_every=...) must be a positive number of steps, or None. "
                f"Received: clip_every={self.clip_every!r}"
            )

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        scalars = {"tau": tf.TensorSpec([], tf.float32), "step": tf.TensorSpec([], tf.int64)}
        return {**gathered.per_tensor("residual", specs), **scalars}

    def _encode_arrays(self, gradients: Sequence[np.ndarray], state: gathered.Arrays) -> gathered.Encoded | None:
        kept = [state[f"residual/{index}"] for index in range(len(gradients))]
        tau = np.float32(self.tau) if not isinstance(self.tau, str) else state["tau"][0]
        if tau == 0:
            tau = self._first_tau(kept, gradients)
        total = sum(gradient.size for gradient in gradients)
        entries = np.empty(int(total * _BITMAP_FROM), np.int64)
        # Without any value other than 0 there is no tau yet, but values must be finite.
        found = _add_all(kept, gradients, float(tau) or gathered.LARGEST, entries)
        if found is None:
            return None
        residuals, count = found
        if count > entries.size:
            flags, sent = _BITMAP, [_send_bitmap(residual, tau) for residual in residuals]
        else:
            entries = entries[:count]
            gathered.add_at(entries, _signed(-tau, entries), residuals)
            flags, sent = 0, [frames.encode(entries, has_signs=True)]
        step = int(state["step"][0]) + 1
        if tau and self.clip_every is not None and step % self.clip_every == 0:
            limit = min(_CLIP * float(tau), gathered.LARGEST)
            for residual in residuals:
                np.clip(residual, -limit, limit, out=residual)
        new = {f"residual/{index}": residual for index, residual in enumerate(residuals)}
        new["tau"] = np.array([self._next_tau(float(tau), count / max(1, total))], np.float32)
        return flags, [_HEAD.pack(tau, count), *sent], {**new, "step": np.array([step], np.int64)}

    def _add_payload(self, flags: int, payload: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        tau, count = _HEAD.unpack(payload[: _HEAD.size].tobytes())
        data = payload[_HEAD.size :]
        if flags & _BITMAP:
            # Four values of each byte.
            pairs = (np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3
            values = np.array([0, tau, 0, -tau], np.float32)[pairs]
            gathered.add_bytes(data, [values] * len(sums), sums)
        else:
            entries = frames.decode(data, count, has_signs=True)
            gathered.add_at(entries, _signed(np.float32(tau), entries), sums)

    def _first_tau(self, residuals: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> np.float32:
        """Returns the magnitude that the wanted fraction of the values exceeds, or 0 if all are 0."""
        stride = max(1, sum(gradient.size for gradient in gradients) // _SAMPLE) | 1
        wanted = math.sqrt(self.min_density * self.max_density)
        for step in (stride, 1):
            pairs = zip(residuals, gradients, strict=True)
            with np.errstate(all="ignore"):
                parts = [np.abs(residual[::step] + gradient[::step]) for residual, gradient in pairs]
            sample = np.concatenate([np.zeros(0, np.float32), *parts])
            # The frame says if a value was not finite; there is a tau all the same.
            sample = sample[np.isfinite(sample) & (sample >= gathered.SMALLEST)]
            if sample.size:
                # Less than any value of the sample at its smallest, so that a single value can be sent.
                rank = min(sample.size - 1, math.ceil((1 - wanted) * sample.size))
                found = np.partition(sample, rank)[rank]
                return np.float32(max(float(found) / 2 if sample.size < 1 / wanted else found, gathered.SMALLEST))
        return np.float32(0)

    def _next_tau(self, tau: float, density: float) -> float:
        if not isinstance(self.tau, str) or tau == 0:
            return tau
        if density > self.max_density:
            tau *= _ADAPTATION
        elif density < self.min_density:
            tau /= _ADAPTATION
        return min(max(tau, gathered.SMALLEST), gathered.LARGEST)


def _add_all(
    kept: Sequence[np.ndarray], gradients: Sequence[np.ndarray], bound: float, entries: np.ndarray
) -> tuple[list[np.ndarray], int] | None:
    """Adds gradients to residuals, in new arrays, and finds the entries; returns None if a sum is not finite."""
    sums, first, count = [], 0, 0
    for residual, gradient in zip(kept, gradients, strict=True):
        total = frames.empty(gradient.size)
        add = gathered.adding(residual, gradient, total)
        found = gathered.compute_and_find(total, add, bound, entries[count:], first)
        if found is None:
            return None
        sums.append(total)
        first += gradient.size
        count += found
    return sums, count


def _signed(tau: np.float32, entries: np.ndarray) -> np.ndarray:
    """Returns tau for positive entries, and -tau for negative ones."""
    return np.where(entries & 1, -tau, tau)


def _send_bitmap(residual: np.ndarray, tau: np.float32) -> np.ndarray:
    """Subtracts what is sent from a residual; returns a bit "sent" and a bit "negative" per value, uint8."""
    packed = []
    for start in range(0, residual.size, gathered.CHUNK):
        values = residual[start : start + gathered.CHUNK]
        bits = np.empty((values.size, 2), np.uint8)
        np.greater(np.abs(values), tau, out=bits[:, 0], casting="unsafe")
        np.multiply(bits[:, 0], np.signbit(values), out=bits[:, 1])
        values -= bits[:, 0] * np.copysign(tau, values)
        packed.append(np.packbits(bits.reshape(-1), bitorder="little"))
    return np.concatenate([np.zeros(0, np.uint8), *packed])
