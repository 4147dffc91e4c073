# SPDX-License-Identifier: Apache-2.0
"""The numbers of examples that the replicas have of one global batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat.tensorflow import inputs, replicas
from tfdist.passes import splitting

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


class ReplicaPart(NamedTuple):
    """A replica's part of the batch of a step.

    Attributes:
      batch: the examples.
      total: int64 scalar, the examples of all replicas together; None if not known.
    """

    batch: Any
    total: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class Shares:
    """Numbers of examples by replica, for one global batch.

    Attributes:
      rows: examples on each replica of this worker, int64.
      total: examples on all replicas of all workers, int64.
      num_replicas: replicas on all workers.
      may_repeat: True if several replicas may have one and the same batch. Then only the first of them has its
        examples, the others are empty.
    """

    rows: tuple[tf.Tensor, ...]
    total: tf.Tensor
    num_replicas: int
    may_repeat: bool = False

    @classmethod
    def of(cls, strategy: Any, data: Any, batches: list[Any], sum_over_workers: Sum) -> Shares | None:
        """Returns the shares of `data`, of which this worker has `batches`; None if all are known to be equal.

        A batch that several replicas were given counts once.
        """
        if strategy.num_replicas_in_sync == 1 or _are_surely_even(strategy, data, batches):
            return None
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data)):
            return cls._of_one_batch(strategy, batches, sum_over_workers)
        return cls.of_batches(
            batches, lambda rows: sum_over_workers([tf.add_n(rows)])[0], strategy.num_replicas_in_sync
        )

    @classmethod
    def _of_one_batch(cls, strategy: Any, batches: list[Any], sum_over_workers: Sum) -> Shares | None:
        """Returns the shares of a batch that every replica of this worker has, and maybe those of all other workers.

        Workers that are given one batch by `train_on_batch` would count its examples several times. A worker with a
        batch of its own, of another content, counts. (A worker of one device gets its part of a batch as it is, too.)
        """
        count = splitting.rows(batches[0])
        if count is None:
            return None
        total, is_first = count, tf.constant(True)
        if replicas.has_other_workers(strategy):
            workers, index = replicas.worker_count(strategy), replicas.worker_index(strategy)
            content = inputs.content_or(strategy, batches[0], index)
            (sums,) = sum_over_workers([tf.stack([count, content, content * content])])
            # By Cauchy and Schwarz, only equal numbers have this sum of their squares.
            is_same = tf.equal(sums[2] * workers, sums[1] * sums[1])
            total = tf.where(is_same, count, sums[0])
            is_first = tf.logical_or(tf.logical_not(is_same), index == 0)
        own = tf.where(is_first, count, tf.zeros_like(count))
        rows = (own, *[tf.zeros_like(own)] * (len(batches) - 1))
        return cls(rows, total, strategy.num_replicas_in_sync, may_repeat=True)

    @classmethod
    def of_batches(
        cls, batches: list[Any], total_of: Callable[[list[tf.Tensor]], tf.Tensor], num_replicas: int
    ) -> Shares | None:
        """Returns the shares of the global batch that this worker has `batches` of; None without an axis of examples.

        Args:
          batches: one for each replica of this worker.
          total_of: given their numbers of examples, returns that of the global batch.
          num_replicas: replicas on all workers.
        """
        rows = [splitting.rows(batch) for batch in batches]
        if any(count is None for count in rows):
            return None
        return cls(tuple(rows), total_of(rows), num_replicas)

    def of_replica(self, replica: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The part of the global batch, 0 to 1, that this replica of this worker has."""
        share = tf.cast(self.rows[replica], tf.float64) / tf.cast(tf.maximum(self.total, 1), tf.float64)
        return tf.cast(share, dtype)

    def of_this_replica(self) -> tf.Tensor:
        """The part of the global batch that this replica has; called in replica context."""
        return self.of_replica(replicas.current())


def _are_surely_even(strategy: Any, data: Any, batches: list[Any]) -> bool:
    """Returns True if, by the static shapes, all replicas have equally many examples."""
    is_alone = strategy.num_replicas_in_sync == len(batches)
    if not _is_distributed(data) or (tf.executing_eagerly() and not is_alone):
        # Sizes of this worker's batches say nothing about other workers: outside of a graph every size is known.
        return False
    if not is_alone and any(map(_is_argument, tf.nest.flatten(batches, expand_composites=True))):
        # The same: a function is traced for the batch size of this worker.
        return False
    sizes = {splitting.static_size(batch) for batch in batches}
    return len(sizes) == 1 and None not in sizes


def _is_argument(leaf: Any) -> bool:
    return tf.is_symbolic_tensor(leaf) and leaf.op.type == "Placeholder"


def _is_distributed(data: Any) -> bool:
    return all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data))
