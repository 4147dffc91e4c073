# SPDX-License-Identifier: Apache-2.0
"""Base class of codecs whose messages are gathered, and that work on NumPy arrays.

All tensors of a step form one index space, tensor after tensor, so that a tensor costs no bytes of its own.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
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


# Flags and payload of a frame, and the new state.
Encoded = tuple[int, list[bytes | np.ndarray], Arrays]


@dataclasses.dataclass(frozen=True, repr=False)
class GatheredCodec(codec.Codec, abc.ABC):
    """Codec on flat float32 arrays, in a frame. Subclasses implement `_encode_arrays` and `_add_payload`."""

    commutes_with_sum: ClassVar[bool] = False

    def _encode(
        self, tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec], state: codec.State
    ) -> tuple[tf.Tensor, codec.State]:
        names = list(state)

        def encode(*inputs: np.ndarray) -> list[np.ndarray]:
            gradients, values = inputs[: len(specs)], inputs[len(specs) :]
            old = dict(zip(names, values, strict=True))
            message, new = self.message_of(gradients, old)
            return [message, *(new[name] for name in names)]

        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
        kept = [tf.reshape(state[name], [-1]) for name in names]
        message, *new = _in_numpy(encode, [*flat, *kept], [tf.uint8, *(state[name].dtype for name in names)])
        message.set_shape([None])
        return message, {name: tf.reshape(value, state[name].shape) for name, value in zip(names, new, strict=True)}

    def _decode(self, received: tf.Tensor, specs: Sequence[tf.TensorSpec], senders: Sequence[str]) -> list[tf.Tensor]:
        sizes = codec.sizes_of(specs)
        decode = functools.partial(self.sum_of, sizes=sizes, senders=senders)
        flat = _in_numpy(decode, [received], [tf.float32] * len(sizes)) if sizes else []
        return [tf.cast(tf.reshape(total, spec.shape), spec.dtype) for total, spec in zip(flat, specs, strict=True)]

    def message_of(self, gradients: Sequence[np.ndarray], state: Arrays) -> tuple[np.ndarray, Arrays]:
        """Encodes arrays, as `encode` does tensors.

        Args:
          gradients: float32 [size] each.
          state: 1-D arrays by name; of scalars [1].

        Returns:
          The message, uint8 [length], and the new state.
        """
        encoded = self._encode_arrays(gradients, state)
        # TensorFlow may share the memory of the old state.
        flags, payload, new = encoded or (frames.NON_FINITE, [], {name: value.copy() for name, value in state.items()})
        return frames.build(self._origin([gradient.size for gradient in gradients]), flags, payload), new

    def sum_of(self, rows: np.ndarray, sizes: Sequence[int], senders: Sequence[str]) -> list[np.ndarray]:
        """Decodes messages, as `decode` does.

        Args:
          rows: uint8 [number of messages, capacity].
          sizes: number of values of each gradient.
          senders: name of the sender of each row.

        Returns:
          The sums, float32 [size] each.

        Raises:
          ValueError: a message is damaged, or does not fit; its sender is named.
        """
        sums = [frames.empty(size) for size in sizes]
        for total in sums:
            total.fill(0)
        origin, is_finite = self._origin(sizes), True
        for row, sender in zip(rows, senders, strict=True):
            flags, payload = frames.parse(row, origin, sender)
            if flags & frames.NON_FINITE:
                is_finite = False
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    self._add_payload(flags, payload, sums)
        for total in () if is_finite else sums:
            total.fill(np.nan)
        return sums

    def _origin(self, sizes: Sequence[int]) -> int:
        return frames.origin_of(type(self).__name__, sizes)

    @abc.abstractmethod
    def _encode_arrays(self, gradients: Sequence[np.ndarray], state: Arrays) -> Encoded | None:
        """Encodes gradients; returns None if a value is not finite.

        Args:
          gradients: float32 [size]; neither they nor the state may be written to.
          state: 1-D arrays; of scalars [1].
        """

    @abc.abstractmethod
    def _add_payload(self, flags: int, payload: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        """Adds the values of a payload of `_encode_arrays`, uint8, to float32 arrays."""


def per_tensor(name: str, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
    """Returns the specs of one state tensor per gradient, float32."""
    return {f"{name}/{index}": tf.TensorSpec(spec.shape, tf.float32) for index, spec in enumerate(specs)}


def add_at(entries: np.ndarray, values: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
    """Adds a value to the place of each entry in the tensors of a step.

    Args:
      entries: int64 [count], 2 * position + (1 if negative), of ascending positions.
      values: float32 [count].
      tensors: float32 [size] each.
    """
    starts = np.cumsum([0, *(tensor.size for tensor in tensors)], dtype=np.int64)
    # Entry 2 * p is the first at position p or behind it.
    bounds = np.searchsorted(entries, 2 * starts)
    for tensor, first, (start, end) in zip(tensors, starts, itertools.pairwise(bounds), strict=False):
        tensor[(entries[start:end] >> 1) - first] += values[start:end]


def add_bytes(data: np.ndarray, values: Sequence[np.ndarray], tensors: Sequence[np.ndarray]) -> None:
    """Adds the values that bytes stand for to tensors, each of which begins with a byte.

    Args:
      data: uint8.
      values: for each tensor those of each byte, float32 [256, values of a byte].
      tensors: float32 arrays.
    """
    for tensor, table in zip(tensors, values, strict=True):
        in_byte = table.shape[1]
        row, data = np.split(data, [-(-tensor.size // in_byte)])
        for start in range(0, tensor.size, CHUNK):
            part = tensor[start : start + CHUNK]
            part += table[row[start // in_byte : (start + CHUNK) // in_byte]].reshape(-1)[: part.size]


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
