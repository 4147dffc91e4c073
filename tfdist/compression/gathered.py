# SPDX-License-Identifier: Apache-2.0
"""Base class of codecs whose messages are gathered, and that work on NumPy arrays.

All tensors of a step form one index space, tensor after tensor, so that a tensor costs no bytes of its own.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow import graphs
from tfdist.compression import codec, frames

# Comparisons by magnitude treat denormal numbers as zeros, as TensorFlow's threads do in their arithmetic.
SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
# Values per chunk: a few arrays of this size stay in the cache.
CHUNK = 1 << 16

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Payload:
    """Content of a frame."""

    flags: int
    parts: list[bytes | np.ndarray]


@dataclasses.dataclass(frozen=True, repr=False)
class GatheredCodec(codec.Codec):
    """Codec on flat float32 arrays, in a frame. Subclasses implement `_encode_arrays` and `_add_payload`."""

    commutes_with_sum: ClassVar[bool] = False
    # In the frame; never to be used again for another codec.
    number: ClassVar[int]

    def _encode(
        self, tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec], state: codec.State
    ) -> tuple[tf.Tensor, codec.State]:
        names = list(state)
        layout = frames.FrameLayout.of(codec.sizes_of(specs))

        def encode(*inputs: np.ndarray) -> list[np.ndarray]:
            gradients, values = inputs[: len(specs)], inputs[len(specs) :]
            old = dict(zip(names, values, strict=True))
            message, new = self.message_of(gradients, old, layout)
            return [message, *(new[name] for name in names)]

        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        kept = [tf.reshape(state[name], [-1]) for name in names]
        message, *new = _in_numpy(encode, [*flat, *kept], [tf.uint8, *(state[name].dtype for name in names)])
        message.set_shape([None])
        return message, {name: tf.reshape(value, state[name].shape) for name, value in zip(names, new, strict=True)}

    def _decode(self, received: tf.Tensor, specs: Sequence[tf.TensorSpec], senders: Sequence[str]) -> list[tf.Tensor]:
        sizes = codec.sizes_of(specs)

        def decode(rows: np.ndarray) -> list[np.ndarray]:
            return self.sum_of(rows, sizes, senders)

        flat = _in_numpy(decode, [received], [tf.float32] * len(sizes)) if sizes else []
        return [tf.cast(tf.reshape(total, spec.shape), spec.dtype) for total, spec in zip(flat, specs, strict=True)]

    def message_of(
        self, gradients: Sequence[np.ndarray], state: Arrays, layout: frames.FrameLayout
    ) -> tuple[np.ndarray, Arrays]:
        """Encodes arrays, as `encode` does tensors.

        Args:
          gradients: float32 [size] each.
          state: 1-D arrays by name; of scalars [1].
          layout: of the gradients.

        Returns:
          The message, uint8 [length], and the new state.
        """
        payload, new = self._encode_arrays(gradients, state)
        if payload is None:
            # TensorFlow may share the memory of the old state.
            payload, new = Payload(frames.NON_FINITE, []), {name: value.copy() for name, value in state.items()}
        return frames.build(self.number, payload.flags, layout, payload.parts), new

    def sum_of(self, rows: np.ndarray, sizes: Sequence[int], senders: Sequence[str]) -> list[np.ndarray]:
        """Decodes messages, as `decode` does.

        Args:
          rows: uint8 [number of messages, capacity].
          sizes: number of values of each gradient.
          senders: name of the sender of each row.

        Returns:
          The sums, float32 [size] each.

        Raises:
          ValueError: a message is truncated or damaged, or does not fit; its sender is named.
        """
        if len(rows) != len(senders):
            raise ValueError(f"each message needs the name of its sender. Received: {len(rows)} messages, {senders=}")
        sums = [frames.empty(size) for size in sizes]
        for total in sums:
            total.fill(0)
        layout, is_finite = frames.FrameLayout.of(sizes), True
        for row, sender in zip(rows, senders, strict=True):
            try:
                flags, payload = frames.parse(row, self.number, layout)
                if flags & frames.NON_FINITE:
                    is_finite = False
                else:
                    with np.errstate(over="ignore", invalid="ignore"):
                        self._add_payload(flags, payload, sums)
            except ValueError as error:
                raise ValueError(f"the message of {sender} can't be decoded: {error}") from None
        for total in () if is_finite else sums:
            total.fill(np.nan)
        return sums

    @abc.abstractmethod
    def _encode_arrays(self, gradients: Sequence[np.ndarray], state: Arrays) -> tuple[Payload | None, Arrays]:
        """Encodes gradients; returns the payload, None if a value is not finite, and the new state.

        Args:
          gradients: float32 [size]; neither they nor the state may be written to.
          state: 1-D arrays; of scalars [1].
        """

    @abc.abstractmethod
    def _add_payload(self, flags: int, payload: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        """Adds the values of a payload, uint8, to float32 arrays.

        Raises:
          ValueError: `_encode_arrays` returns no such payload.
        """


def per_tensor(name: str, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    """Returns the specs of one state tensor per gradient, float32."""
    return {f"{name}/{index}": tf.TensorSpec(spec.shape, tf.float32) for index, spec in enumerate(specs)}


def slices_of(entries: np.ndarray, sizes: Sequence[int]) -> list[slice]:
    """Returns, for each tensor, the slice of its entries.

    Args:
      entries: int64 [count], 2 * position + (1 if negative), ascending.
      sizes: number of values of each tensor.
    """
    # Entry 2 * p is the first at position p or behind it.
    bounds = np.searchsorted(entries, 2 * np.cumsum([0, *sizes], dtype=np.int64))
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def adding(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Callable[[slice], object]:
    """Returns a function for `compute_and_find` that adds float32 arrays."""
    return lambda chunk: np.add(a[chunk], b[chunk], out=out[chunk])


def compute_and_find(
    out: np.ndarray, compute: Callable[[slice], object], bound: float, entries: np.ndarray, first: int = 0
) -> int | None:
    """Computes values a chunk at a time, and finds those of a magnitude above a bound.

    Args:
      out: float32 [size].
      compute: fills a slice of `out`.
      bound: a float32.
      entries: int64 [capacity], takes the first entries: 2 * position + (1 if negative), ascending.
      first: position of out[0] among the values of a step.

    Returns:
      The number of entries, of which those beyond the capacity are not written; None if a value is not finite.
    """
    count, limit = 0, np.float32(bound)
    for start in range(0, out.size, CHUNK):
        chunk = slice(start, start + CHUNK)
        with np.errstate(all="ignore"):
            compute(chunk)
        magnitudes = np.abs(out[chunk])
        most = magnitudes.max()
        if not np.isfinite(most):
            return None
        if most > limit:
            found = np.flatnonzero(magnitudes > limit)
            kept = found[: max(0, entries.size - count)] + start
            entries[count : count + kept.size] = (kept + first) * 2 + np.signbit(out[kept])
            count += found.size
    return count


def _in_numpy(
    function: Callable[..., list[np.ndarray]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Calls a function of arrays, in a graph by an operation."""
    if tf.executing_eagerly():
        # tf.numpy_function would copy its inputs.
        return [tf.constant(output) for output in function(*(np.asarray(each) for each in inputs))]
    return graphs.call_on_arrays(function, inputs, dtypes)
