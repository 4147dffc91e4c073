# SPDX-License-Identifier: Apache-2.0
"""Sums of tensors over the workers of a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import replicas, worker_collectives
from tfdist.transport import buckets

# Sums an array over the workers, in place if the second argument is True; returns the sum.
SumArray = Callable[[np.ndarray, bool], np.ndarray]
Waiting = Callable[[str], contextlib.AbstractContextManager]
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerSums:
    """Sums over all workers, in cross-replica context, in a graph or eagerly. All workers sum the same, in one order.

    Args:
      strategy: the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._sum_array: SumArray | None = None
        self._waiting: Waiting = contextlib.nullcontext
        self._failed: Callable[[], Exception | None] = lambda: None
        # By graph, the name of the operation that makes its last sum in Python.
        self._last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def use(self, sum_array: SumArray, waiting: Waiting, failed: Callable[[], Exception | None]) -> None:
        """Has arrays summed from now on by a function, in place of TensorFlow's collectives.

        Args:
          sum_array: the function.
          waiting: returns a context in which the main thread is known to wait for what is named.
          failed: returns the exception of a sum that has failed, if one has.
        """
        self._sum_array, self._waiting, self._failed = sum_array, waiting, failed

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors, with one collective for each dtype."""
        if not replicas.has_other_workers(self._strategy):
            return list(tensors)
        return buckets.sum_together(tensors, self._sum_of)

    def in_step(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors in buckets, in a step that all workers of one device each trace alike."""
        sum_of = functools.partial(self._sum_of, in_step=True)
        return buckets.sum_in_buckets(tensors, lambda bucket: buckets.sum_together(bucket, sum_of, _put_together))

    def failure(self) -> Exception | None:
        """Returns the Python exception of a sum that has failed, in place of which a step raises TensorFlow's own."""
        return self._failed()

    def _sum_of(self, flat: tf.Tensor, in_step: bool = False) -> tf.Tensor:
        if self._sum_array is None or flat.dtype not in _DTYPES:
            by_collectives = worker_collectives.sum_in_step if in_step else worker_collectives.sum_of
            return by_collectives(self._strategy, flat)
        # Tensors that were put together for the sum in a step are nobody else's.
        in_place = in_step and not tf.executing_eagerly() and flat.op.type == "ConcatV2"
        return self._by_function(self._sum_array, flat, in_place)

    def _by_function(self, sum_array: SumArray, flat: tf.Tensor, in_place: bool) -> tf.Tensor:
        with tf.device(replicas.worker_device(self._strategy)):
            if tf.executing_eagerly():
                with self._waiting("a sum over all workers"):
                    return tf.constant(sum_array(flat.numpy(), False))
            graph: Any = tf.compat.v1.get_default_graph()
            before = self._last.get(graph)
            # All workers must come to the sums in one order, also to those that don't depend on each other.
            with tf.control_dependencies([graph.get_operation_by_name(before)] if before else []):
                total = tf.numpy_function(lambda array: sum_array(array, in_place), [flat], flat.dtype)
            self._last[graph] = total.op.name
        total.set_shape(flat.shape)
        return total


def _put_together(flat: list[tf.Tensor]) -> tf.Tensor:
    """Returns one tensor whose memory is nobody else's, so that it may be summed in place.

    Of constants alone, TensorFlow makes a constant when it optimizes the graph, and the next step would begin with the
    last one's sum. An axis that is not a constant keeps it from that.
    """
    if tf.executing_eagerly():
        return tf.concat(flat, 0)
    return tf.concat(flat, _zeros()[0])


@functools.cache
def _zeros() -> tf.Tensor:
    """Zeros that a graph takes from outside: they are too many to become a constant of it."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tf.zeros([1024], tf.int32)
