# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: gradients of low rank, by one step of a power iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tfdist import _checks
from tfdist.compression import codec

_SEED = 1712


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSGD(codec.Codec):
    """Sums gradients as products of two thin matrices, with error feedback.

    With a gradient as matrix M [n, m], error included, and Q [m, rank] of the last step: P = sum of M Q over the
    workers (first all-reduce); P_hat = orthonormal columns of P; q = M^T P_hat; Q = sum of q (second all-reduce). The
    sum of the gradients is P_hat Q^T, and a worker keeps the error M - P_hat q^T. Source: Vogels, Karimireddy and Jaggi
    2019, PowerSGD, arXiv 1905.13727, algorithms 1 and 2.

    Unlike the paper, P is orthogonalized by a QR decomposition, which also works for zero and rank-deficient gradients.
    The error is that of the worker's own part. So, summed over the workers, gradients sent plus errors kept equal the
    gradients of the step. Workers decompose the same sum: on CPUs of one type they get the same bits.

    Tensors of more than two dimensions are matrices [-1, last dimension]. Vectors, scalars and matrices that would
    shrink to more than 1 / `min_compression` are sent as they are, in float32, with the first all-reduce.

    State, for each tensor i that is compressed: `residual/i` (float32 of the tensor's shape), and `query/i` (Q / number
    of workers, float32 [m, rank]). Q is equal on all workers, and random from a fixed seed at first.

    Call `exchange`: `encode` and `decode` raise TypeError, because the second sum depends on the first.

    Args:
      rank: columns of P and Q, at least 1.
      min_compression: a matrix is compressed if n * m >= min_compression * (n + m) * rank.

    Raises:
      ValueError: an argument is out of range.
    """

    rank: int
    min_compression: float = 2.0

    commutes_with_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.check_count("PowerSGD", "rank", self.rank)
        if not _checks.is_number(self.min_compression) or self.min_compression < 1:
            raise ValueError(
                "PowerSGD(min_compression=...) must be at least 1: fewer values are sent as they are. "
                f"Received: min_compression={self.min_compression!r}"
            )

    def init(self, specs: Sequence[tf.TensorSpec]) -> codec.State:
        """See `Codec.init`; queries are random, from a fixed seed."""
        state = super().init(specs)
        for number, name in enumerate(name for name in state if name.startswith("query/")):
            state[name] = tf.random.stateless_normal(state[name].shape, [_SEED, number])
        return state

    def exchange(
        self, tensors: Sequence[tf.Tensor], state: codec.State, transport: codec.Transport
    ) -> tuple[list[tf.Tensor], codec.State]:
        """See `Codec.exchange`. Calls `transport.sum` twice, or once if no tensor is compressed."""
        specs = self._checked(tensors, state)
        chosen = [index for index, spec in enumerate(specs) if self._is_compressed(spec)]
        plain = [index for index in range(len(specs)) if index not in chosen]
        gradients = [tf.cast(tensor, tf.float32) for tensor in tensors]
        corrected = [gradients[index] + state[f"residual/{index}"] for index in chosen]
        matrices = [tf.reshape(each, _matrix_shape(each.shape)) for each in corrected]
        products = [tf.matmul(m, state[f"query/{index}"]) for m, index in zip(matrices, chosen, strict=True)]
        first = _sum_together([*products, *(gradients[index] for index in plain)], transport)
        bases = [tf.linalg.qr(product).q for product in first[: len(chosen)]]
        own = [tf.matmul(m, basis, transpose_a=True) for m, basis in zip(matrices, bases, strict=True)]
        second = _sum_together(own, transport)

        sums = dict(zip(plain, first[len(chosen) :], strict=True))
        new: codec.State = {}
        for index, m, basis, sent, total in zip(chosen, matrices, bases, own, second, strict=True):
            shape = specs[index].shape
            sums[index] = tf.reshape(tf.matmul(basis, total, transpose_b=True), shape)
            new[f"residual/{index}"] = tf.reshape(m - tf.matmul(basis, sent, transpose_b=True), shape)
            new[f"query/{index}"] = total / transport.num_workers
        # The same values on all workers, so all keep the old state or none does.
        state = codec.keep_if(_all_finite([*first, *second]), {name: new[name] for name in state}, state)
        return [tf.cast(sums[index], spec.dtype) for index, spec in enumerate(specs)], state

    def _is_compressed(self, spec: tf.TensorSpec) -> bool:
        if spec.shape.rank < 2 or spec.shape.num_elements() == 0:
            return False
        n, m = _matrix_shape(spec.shape)
        return n * m >= self.min_compression * (n + m) * self.rank and self.rank <= min(n, m)

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        chosen = [(index, spec) for index, spec in enumerate(specs) if self._is_compressed(spec)]
        residuals = {f"residual/{index}": tf.TensorSpec(spec.shape, tf.float32) for index, spec in chosen}
        queries = {f"query/{i}": tf.TensorSpec([spec.shape[-1], self.rank], tf.float32) for i, spec in chosen}
        return {**residuals, **queries}


def _matrix_shape(shape: tf.TensorShape) -> tuple[int, int]:
    return shape.num_elements() // shape[-1], shape[-1]


def _sum_together(tensors: Sequence[tf.Tensor], transport: codec.Transport) -> list[tf.Tensor]:
    """Sums float32 tensors over the workers, with one all-reduce."""
    if not tensors:
        return []
    total = transport.sum(tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0))
    return codec.split(total, [tf.TensorSpec(tensor.shape, tf.float32) for tensor in tensors])


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    checks = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]
    return tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)
