# SPDX-License-Identifier: Apache-2.0
"""Gradients in half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tfdist.compression import codec

_DTYPES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, repr=False)
class HalfPrecision(codec.Codec):
    """Rounds gradients to 16 bits, which are summed (all-reduce): half the bytes of float32.

    An all-reduce adds the halves in transit, so its messages have no checksum. Parameter servers receive the halves of
    each worker in a message of its own, with a checksum (`on_servers`).

    It has no state. Values beyond the range of float16 (65504) become infinite, and so may their sum over the workers.
    A check for finite gradients, such as that of loss scaling, then skips the step. bfloat16 has the range of float32.

    Args:
      dtype: "float16" or "bfloat16".

    Raises:
      ValueError: another dtype.
    """

    dtype: str

    commutes_with_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(
                f'HalfPrecision(dtype=...) must be "float16" or "bfloat16". Received: dtype={self.dtype!r}'
            )

    def _encode(
        self, tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec], state: codec.State
    ) -> tuple[tf.Tensor, codec.State]:
        dtype = tf.as_dtype(self.dtype)
        flat = [tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in tensors]
        return tf.concat(flat, 0) if flat else tf.zeros([0], dtype), {}

    def _decode(self, received: tf.Tensor, specs: Sequence[tf.TensorSpec], senders: Sequence[str]) -> list[tf.Tensor]:
        return codec.split(received, specs)
