# SPDX-License-Identifier: Apache-2.0
"""Sums and messages of tensors over the workers of a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.tensorflow import collectives, replicas, variables
from tfdist.transport import buckets

# Counts the bytes that the workers send each other.


class Traffic:
    """Bytes that each worker has sent, counted where it sends. Headers of gRPC and TCP are left out.

    Args:
      num_workers: number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._sent: Any = None

    def add_sum(self, size: Any) -> None:
        """Adds a sum over all workers, of so many bytes, that goes around a ring; in a graph or eagerly."""
        # Patarasuk and Yuan, 2009: each worker sends 2 (n - 1) / n of them.
        self._add(2 * (self._num_workers - 1) * tf.cast(size, tf.int64) // self._num_workers)

    def add_messages(self, sizes: Any) -> None:
        """Adds messages that all workers have sent to all others.

        Args:
          sizes: int64, the bytes of each worker's message, or of all.
        """
        self._add((self._num_workers - 1) * tf.cast(sizes, tf.int64))

    def by_worker(self) -> list[int]:
        """Returns the bytes that each worker has sent so far."""
        return [0] * self._num_workers if self._sent is None else [int(each) for each in self._sent.numpy()]

    def _add(self, sent: tf.Tensor) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            if self._sent is None:
                self._sent = variables.variable_of_process(tf.zeros([self._num_workers], tf.int64), "bytes_sent")
        self._sent.assign_add(tf.broadcast_to(sent, [self._num_workers]), read_value=False)


# Sends a codec's messages between the workers of a `MultiWorkerMirroredStrategy`.


@dataclasses.dataclass(frozen=True)
class Messages:
    """The `tfdist.compression.codec.Transport` of several workers with one device each.

    Attributes:
      sums: sums and gathers.
      senders: names of the workers, for errors.
      index: the index of this worker.
      is_in_step: whether all workers trace alike what calls it, as in a step of `fit`; see `WorkerSums.in_step`.
    """

    sums: WorkerSums
    senders: Sequence[str]
    index: int
    is_in_step: bool = False

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.senders)

    def sum(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a 1-D tensor over the workers."""
        (total,) = self.sums.in_step([flat]) if self.is_in_step else self.sums([flat])
        return total

    def gather(self, message: tf.Tensor) -> tf.Tensor:
        """Returns the messages (uint8) of all workers, padded to the longest: [workers, longest]."""
        return self.sums.gather(message, self.is_in_step)

    def broadcast(self, arrays: Sequence[np.ndarray], source: int) -> list[np.ndarray]:
        """Returns the arrays of one worker, outside of steps; all workers have some of the same shapes and dtypes."""
        given = [tf.constant(array if self.index == source else np.zeros_like(array)) for array in arrays]
        # Collectives add no booleans and no short integers.
        summed = self.sums([each if each.dtype.is_floating else tf.cast(each, tf.int64) for each in given])
        return [tf.cast(each, like.dtype).numpy() for each, like in zip(summed, given, strict=True)]


# Sums an array over the workers, in place if the second argument is True; returns the sum.
SumArray = Callable[[np.ndarray, bool], np.ndarray]
# Gathers an array of bytes from each worker; returns them padded, uint8 [workers, longest], and their lengths, int64.
GatherBytes = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Waiting = Callable[[str], contextlib.AbstractContextManager]
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerSums:
    """Sums over all workers, in a graph or eagerly, in any context. All workers sum the same, in one order.

    Args:
      strategy: the strategy.

    Attributes:
      traffic: counts what is sent; None for no counts.
      failure: returns the Python exception of a sum that has failed, in place of which a step raises TensorFlow's own.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.traffic: Traffic | None = None
        self._sum_array: SumArray | None = None
        self._gather_bytes: GatherBytes | None = None
        self._waiting: Waiting = contextlib.nullcontext
        self.failure: Callable[[], Exception | None] = lambda: None
        # By graph, the name of the operation that makes its last call of Python.
        self._last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def use(
        self, sum_array: SumArray, gather_bytes: GatherBytes, waiting: Waiting, failure: Callable[[], Exception | None]
    ) -> None:
        """Sums and gathers arrays by these functions from now on, in place of TensorFlow's collectives.

        Args:
          sum_array: sums.
          gather_bytes: gathers.
          waiting: returns a context in which the main thread is known to wait for what is named.
          failure: see `WorkerSums`.
        """
        self._sum_array, self._gather_bytes = sum_array, gather_bytes
        self._waiting, self.failure = waiting, failure

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors, with one collective for each dtype."""
        if not replicas.has_other_workers(self._strategy):
            return list(tensors)
        return self._by_part(tensors, lambda chosen: buckets.sum_together(chosen, self._sum_of))

    def in_step(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors in buckets, in a step that all workers of one device each trace alike."""
        sum_of = functools.partial(self._sum_of, in_step=True)

        def sum_in_buckets(chosen: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return buckets.sum_in_buckets(chosen, lambda bucket: buckets.sum_together(bucket, sum_of))

        return self._by_part(tensors, sum_in_buckets)

    def _by_part(
        self, tensors: Sequence[tf.Tensor], sum_up: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Sums the tensors of each part on the device that has the part, if replicas span devices."""
        parts = replicas.parts_of(self._strategy)
        # Eager tensors of one variable may be on different devices on the workers, who all must sum alike.
        if parts is None or tf.executing_eagerly():
            return sum_up(tensors)
        sums: list[Any] = list(tensors)
        for chosen in collectives.by_part(parts, tensors):
            with tf.device(parts.groups[0][parts.part_of(tensors[chosen[0]])]):
                totals = sum_up([tensors[index] for index in chosen])
            for index, total in zip(chosen, totals, strict=True):
                sums[index] = total
        return sums

    def gather(self, message: tf.Tensor, in_step: bool = False) -> tf.Tensor:
        """Gathers a message of each worker.

        Args:
          message: 1-D uint8; each worker has one of its own length.
          in_step: True in a step that all workers of one device each trace alike.

        Returns:
          uint8 [workers, longest], each message padded with zeros.
        """
        if self._gather_bytes is None:
            gathered = collectives.gather(self._strategy, message, in_step)
            if self.traffic:
                self.traffic.add_messages(collectives.gathered_bytes(tf.shape(gathered)[1]))
            return gathered
        what = "the messages of all workers"
        gathered, lengths = self._in_python(self._gather_bytes, what, message, [tf.uint8, tf.int64])
        gathered.set_shape([replicas.worker_count(self._strategy), None])
        lengths.set_shape([replicas.worker_count(self._strategy)])
        if self.traffic:
            self.traffic.add_messages(lengths)
        return gathered

    def _sum_of(self, flat: tf.Tensor, in_step: bool = False) -> tf.Tensor:
        sum_array = self._sum_array if flat.dtype in _DTYPES else None
        if self.traffic:
            size = tf.size(flat, tf.int64) * flat.dtype.size
            if sum_array is None and in_step and collectives.is_gathered(self._strategy, flat):
                self.traffic.add_messages(size)
            else:
                self.traffic.add_sum(size)
        if sum_array is None:
            by_collectives = collectives.sum_in_step if in_step else collectives.sum_of
            return by_collectives(self._strategy, flat)
        in_place = not tf.executing_eagerly()
        call = lambda array: [sum_array(array, in_place)]  # noqa: E731
        (total,) = self._in_python(call, "a sum over all workers", flat, [flat.dtype])
        total.set_shape(flat.shape)
        return total

    def _in_python(
        self, function: Callable[[np.ndarray], Sequence[Any]], what: str, given: tf.Tensor, dtypes: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """Calls a function of an array, which waits for all workers; in a graph it owns the array."""
        with tf.device(replicas.worker_device(self._strategy)):
            if tf.executing_eagerly():
                with self._waiting(what):
                    return [tf.constant(each) for each in function(given.numpy())]
            # All workers must come to the calls in one order, also to those that don't depend on each other.
            graph: Any = tf.compat.v1.get_default_graph()
            before = self._last.get(graph)
            with tf.control_dependencies([graph.get_operation_by_name(before)] if before else []):
                results = tf.numpy_function(_raising_in_short(function), [_owned(given)], dtypes)
            self._last[graph] = results[0].op.name
            return results


def _raising_in_short(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that raises the loss of a worker without frames of its own: TensorFlow logs them, twice."""

    def call(*given: Any) -> Any:
        try:
            return function(*given)
        except ConnectionError as error:
            raise error.with_traceback(None) from None

    return call


def _owned(flat: tf.Tensor) -> tf.Tensor:
    """Returns a 1-D tensor of a graph that owns its memory, so that it may be summed in place.

    Snapshot copies a tensor only if something else holds its buffer too, such as a variable or a later operation. Of a
    constant, TensorFlow would make another constant when it optimizes the graph, and the next step would begin with the
    last one's sum. A slice whose begin is not a constant keeps it from that, and copies nothing.
    """
    return tf.raw_ops.Snapshot(input=tf.slice(flat, _zeros()[:1], [-1]))


@functools.cache
def _zeros() -> tf.Tensor:
    """Zeros that a graph takes from outside: they are too many to become a constant of it."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tf.zeros([1024], tf.int32)
