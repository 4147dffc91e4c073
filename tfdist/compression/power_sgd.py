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
# In root mean squares: of the least error with 16 levels and normal values (Max 1960, doi:10.1109/TIT.1960.1057548).
_STEP = 0.335


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

    With `bits=4`, values of M Q, of q and of the tensors that are sent as they are become one of 15 levels. The step is
    0.335 times the root mean square of a column, and messages are gathered. P_hat is of the rounded P; what rounding
    changes in q and in the other tensors goes into the error, so each tensor has a residual.

    Call `exchange`: `encode` and `decode` raise TypeError, because the second sum depends on the first.

    Args:
      rank: columns of P and Q, at least 1.
      min_compression: a matrix is compressed if n * m >= min_compression * (n + m) * rank.
      bits: 32 or 4, of each value sent.

    Raises:
      ValueError: an argument is out of range.
    """

    rank: int
    min_compression: float = 2.0
    bits: int = 32

    commutes_with_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.check_count("PowerSGD", "rank", self.rank)
        if not _checks.is_number(self.min_compression) or self.min_compression < 1:
            raise ValueError(
                "PowerSGD(min_compression=...) must be at least 1: fewer values are sent as they are. "
                f"Received: min_compression={self.min_compression!r}"
            )
        if self.bits not in (4, 32):
            raise ValueError(f"PowerSGD(bits=...) must be 4 or 32. Received: bits={self.bits!r}")

    def init(self, specs: Sequence[tf.TensorSpec]) -> codec.State:
        """See `Codec.init`; queries are random, from a fixed seed."""
        state = super().init(specs)
        for number, name in enumerate(name for name in state if name.startswith("query/")):
            state[name] = tf.random.stateless_normal(state[name].shape, [_SEED, number])
        return state

    def exchange(
        self, tensors: Sequence[tf.Tensor], state: codec.State, transport: codec.Transport
    ) -> tuple[list[tf.Tensor], codec.State]:
        """See `Codec.exchange`. Calls the transport twice, or once if no tensor is compressed."""
        specs = self._checked(tensors, state)
        chosen = [index for index, spec in enumerate(specs) if self._is_compressed(spec)]
        plain = [index for index in range(len(specs)) if index not in chosen]
        whole = [tf.cast(each, tf.float32) + state.get(f"residual/{i}", 0.0) for i, each in enumerate(tensors)]
        matrices = [tf.reshape(whole[index], _matrix_shape(specs[index].shape)) for index in chosen]
        products = [tf.matmul(m, state[f"query/{index}"]) for m, index in zip(matrices, chosen, strict=True)]
        small = [tf.reshape(whole[index], [-1, 1]) for index in plain]
        sent, first = self._sum([*products, *small], transport)
        bases = [tf.linalg.qr(product).q for product in first[: len(chosen)]]
        factors = [tf.matmul(m, basis, transpose_a=True) for m, basis in zip(matrices, bases, strict=True)]
        own, second = self._sum(factors, transport)

        sums = dict(zip(plain, first[len(chosen) :], strict=True))
        new = {f"residual/{i}": each - kept for i, each, kept in zip(plain, small, sent[len(chosen) :], strict=True)}
        for index, m, basis, each, total in zip(chosen, matrices, bases, own, second, strict=True):
            sums[index] = tf.matmul(basis, total, transpose_b=True)
            new[f"residual/{index}"] = m - tf.matmul(basis, each, transpose_b=True)
            new[f"query/{index}"] = total / transport.num_workers
        # The same values on all workers, so all keep the old state or none does.
        is_finite = tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(each)) for each in (*first, *second))])
        state = codec.keep_if(is_finite, {name: tf.reshape(new[name], state[name].shape) for name in state}, state)
        return [tf.cast(tf.reshape(sums[index], spec.shape), spec.dtype) for index, spec in enumerate(specs)], state

    def _sum(self, matrices: Sequence[tf.Tensor], transport: codec.Transport) -> Sequence[Sequence[tf.Tensor]]:
        """Returns what this worker sends of its float32 matrices, and the sums over the workers."""
        if not any(each.shape.num_elements() for each in matrices):
            return matrices, matrices
        if self.bits == 32:
            total = transport.sum(tf.concat([tf.reshape(each, [-1]) for each in matrices], 0))
            return matrices, codec.split(total, [tf.TensorSpec(each.shape, tf.float32) for each in matrices])
        message = _rounded(matrices)
        return [_sum_of_rounded(rows, matrices) for rows in (message[tf.newaxis], transport.gather(message))]

    def _is_compressed(self, spec: tf.TensorSpec) -> bool:
        if spec.shape.rank < 2 or spec.shape.num_elements() == 0:
            return False
        n, m = _matrix_shape(spec.shape)
        return n * m >= self.min_compression * (n + m) * self.rank and self.rank <= min(n, m)

    def _state_specs(self, specs: Sequence[tf.TensorSpec]) -> dict[str, tf.TensorSpec]:
        chosen = [(index, spec) for index, spec in enumerate(specs) if self._is_compressed(spec)]
        kept = chosen if self.bits == 32 else enumerate(specs)
        residuals = {f"residual/{index}": tf.TensorSpec(spec.shape, tf.float32) for index, spec in kept}
        queries = {f"query/{i}": tf.TensorSpec([spec.shape[-1], self.rank], tf.float32) for i, spec in chosen}
        return {**residuals, **queries}


def _matrix_shape(shape: tf.TensorShape) -> tuple[int, int]:
    return shape.num_elements() // shape[-1], shape[-1]


def _rounded(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a message: the step of each column, float32, and 4 bits of each value."""
    steps = [tf.norm(each, axis=0) * (_STEP / max(1, each.shape[0]) ** 0.5) for each in matrices]
    levels = [tf.reshape(tf.math.divide_no_nan(*pair), [-1]) for pair in zip(matrices, steps, strict=True)]
    levels = tf.cast(tf.clip_by_value(tf.round(tf.concat([*levels, [0.0]], 0)), -7, 7) + 8, tf.uint8)
    pairs = tf.reshape(levels[: levels.shape[0] // 2 * 2], [-1, 2])
    return tf.concat([tf.reshape(tf.bitcast(tf.concat(steps, 0), tf.uint8), [-1]), pairs[:, 0] + 16 * pairs[:, 1]], 0)


def _sum_of_rounded(rows: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums of matrices over rows, each a message of `_rounded`."""
    columns, sizes = [each.shape[1] for each in like], [each.shape.num_elements() for each in like]
    count, head, end = tf.shape(rows)[0], 4 * sum(columns), 4 * sum(columns) + (sum(sizes) + 1) // 2
    steps = tf.bitcast(tf.reshape(rows[:, :head], [count, sum(columns), 4]), tf.float32)
    levels = tf.reshape(tf.stack([rows[:, head:end] & 15, rows[:, head:end] // 16], 2), [count, -1])[:, : sum(sizes)]
    parts = zip(tf.split(tf.cast(levels, tf.float32) - 8, sizes, 1), tf.split(steps, columns, 1), like, strict=True)
    return [tf.reduce_sum(tf.reshape(x, [count, *each.shape]) * step[:, tf.newaxis], 0) for x, step, each in parts]
