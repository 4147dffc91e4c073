# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that the workers send each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat import process_variable


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
                self._sent = process_variable.of(tf.zeros([self._num_workers], tf.int64), "bytes_sent")
        self._sent.assign_add(tf.broadcast_to(sent, [self._num_workers]), read_value=False)
