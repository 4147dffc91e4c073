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
      may_lack: bool scalar, the same on all workers: False if each of them has an example; None if it is not known.
    """

    rows: tuple[tf.Tensor, ...]
    total: tf.Tensor
    num_replicas: int
    may_repeat: bool = False
    may_lack: tf.Tensor | None = None

    @classmethod
    def of(cls, strategy: Any, data: Any, batches: list[Any], sum_over_workers: Sum) -> Shares | None:
        """Returns the shares of `data`, of which this worker has `batches`; None if all are known to be equal.

        A batch that several replicas were given counts once.
        """
        if strategy.num_replicas_in_sync == 1 or _are_surely_even(strategy, data, batches):
            return None
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data)):
            return cls._of_one_batch(strategy, batches, sum_over_workers)

        def counted(rows: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            own = tf.add_n(rows)
            (sums,) = sum_over_workers([tf.stack([own, tf.cast(tf.equal(own, 0), tf.int64)])])
            return sums[0], sums[1] > 0

        return cls.of_batches(batches, counted, strategy.num_replicas_in_sync)

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
            workers, content = replicas.worker_count(strategy), inputs.content(strategy).read_value()
            (sums,) = sum_over_workers([tf.stack([count, content, content * content])])
            # By Cauchy and Schwarz, only equal numbers have this sum of their squares.
            is_same = tf.equal(sums[2] * workers, sums[1] * sums[1])
            total = tf.where(is_same, count, sums[0])
            is_first = tf.logical_or(tf.logical_not(is_same), replicas.worker_index(strategy) == 0)
        own = tf.where(is_first, count, tf.zeros_like(count))
        rows = (own, *[tf.zeros_like(own)] * (len(batches) - 1))
        return cls(rows, total, strategy.num_replicas_in_sync, may_repeat=True)

    @classmethod
    def of_batches(
        cls, batches: list[Any], counted: Callable[[list[tf.Tensor]], tuple[tf.Tensor, tf.Tensor]], num_replicas: int
    ) -> Shares | None:
        """Returns the shares of the global batch that this worker has `batches` of; None without an axis of examples.

        Args:
          batches: one for each replica of this worker.
          counted: given their numbers of examples, returns that of the global batch, and `may_lack`.
          num_replicas: replicas on all workers.
        """
        rows = [splitting.rows(batch) for batch in batches]
        if any(count is None for count in rows):
            return None
        total, may_lack = counted(rows)
        return cls(tuple(rows), total, num_replicas, may_lack=may_lack)

    def of_replica(self, replica: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """The part of the global batch, 0 to 1, that this replica of this worker has."""
        share = tf.cast(self.rows[replica], tf.float64) / tf.cast(tf.maximum(self.total, 1), tf.float64)
        return tf.cast(share, dtype)


def _are_surely_even(strategy: Any, data: Any, batches: list[Any]) -> bool:
    """Returns True if, by the static shapes, all replicas have equally many examples."""
    is_alone = strategy.num_replicas_in_sync == len(batches)
    is_distributed = all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data))
    if not is_distributed or (tf.executing_eagerly() and not is_alone):
        # Sizes of this worker's batches say nothing about other workers: outside of a graph every size is known.
        return False
    leaves = tf.nest.flatten(batches, expand_composites=True)
    if not is_alone and any(tf.is_symbolic_tensor(leaf) and leaf.op.type == "Placeholder" for leaf in leaves):
        # The same: a function is traced for the batch size of this worker.
        return False
    sizes = {splitting.static_size(batch) for batch in batches}
    return len(sizes) == 1 and None not in sizes


# Every byte, as a string.
_BYTES = [bytes([byte]) for byte in range(256)]


def examples_of_others(strategy: Any, shares: Shares, parts: Sequence[Any], sum_over_workers: Sum) -> list[Any]:
    """Returns an example of the first worker that has one, in a batch that no worker has if each has its own.

    It is sent in steps only in which a worker has none, as bytes, because components may be strings or ragged.

    Args:
      strategy: the strategy.
      shares: of this batch.
      parts: of this worker's replicas.
      sum_over_workers: sums tensors over all workers.

    Returns:
      Batches of one example or none: one, or nothing if there are no other workers, or it is not known that all of them
      trace this.
    """
    is_alike = not tf.executing_eagerly() and all(splitting.static_size(part) is None for part in parts)
    if shares.may_lack is None or not is_alike or not replicas.has_other_workers(strategy):
        return []
    leaves = tf.nest.flatten(parts[-1])
    chosen = [index for index, leaf in enumerate(leaves) if splitting.has_rows(leaf)]
    own = [
        [tf.nest.flatten(splitting.first_examples(part, 1))[index] for index in chosen]
        for part in (parts[-1], parts[0])
    ]
    given = own[0] if len(parts) == 1 else [*map(splitting.joined, *own)]
    first = splitting.first_examples(given, 1)
    flat = tf.nest.flatten(first, expand_composites=True)
    specs = [tf.TensorSpec(tf.TensorShape(each.shape), each.dtype) for each in flat]
    index, count = replicas.worker_index(strategy), replicas.worker_count(strategy)
    rows: Any = tf.add_n(shares.rows)

    def sent() -> list[tf.Tensor]:
        whole = tf.io.serialize_tensor(tf.stack([tf.io.serialize_tensor(each) for each in flat]))
        content = tf.cast(tf.io.decode_raw(whole, tf.uint8), tf.int32)[: tf.where(rows > 0, tf.int32.max, 0)]
        (sizes,) = sum_over_workers([tf.size(content) * tf.one_hot(index, count, dtype=tf.int32)])
        source = tf.argmax(tf.cast(sizes > 0, tf.int32), output_type=tf.int32)
        is_own, size = tf.equal(source, index), sizes[source]
        mine = tf.cond(is_own, lambda: content, lambda: tf.zeros([size], tf.int32))
        (found,) = sum_over_workers([mine])
        joined = tf.strings.reduce_join(tf.gather(tf.constant(_BYTES), found))
        strings = tf.io.parse_tensor(joined, tf.string)
        return [tf.io.parse_tensor(strings[number], spec.dtype) for number, spec in enumerate(specs)]

    def nothing() -> list[tf.Tensor]:
        return tf.nest.flatten(splitting.first_examples(first, 0), expand_composites=True)

    must_send: Any = tf.logical_and(shares.may_lack, shares.total > 0)
    with tf.device(replicas.worker_device(strategy)):
        found = tf.nest.flatten(tf.cond(must_send, sent, nothing))
    for tensor, spec in zip(found, specs, strict=True):
        tensor.set_shape([None, *spec.shape[1:]] if spec.shape.rank else [])
    received = tf.nest.pack_sequence_as(first, found, expand_composites=True)
    for place, leaf in zip(chosen, received, strict=True):
        leaves[place] = leaf
    return [tf.nest.pack_sequence_as(parts[-1], leaves)]
