# SPDX-License-Identifier: Apache-2.0
"""Sends a codec's messages between the workers of a `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.transport.sums import WorkerSums


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
        given = [array if self.index == source else np.zeros_like(array) for array in arrays]
        return [each.numpy() for each in self.sums([tf.constant(array) for array in given])]
