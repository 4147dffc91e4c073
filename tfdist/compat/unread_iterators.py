# SPDX-License-Identifier: Apache-2.0
"""Makes no iterator where Keras makes one of a distributed data set and never reads it.

At the end of each pass Keras makes an iterator for the next one, and at the beginning of the next one it makes another
instead, unless `steps_per_epoch` is given. To make one takes half of the time of a small `predict`. There is no public
way to see which of the two it is. Where data are shuffled, each iterator that is made changes the order of those that
come later, also on one device: there all are made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

from tfdist.compat import array_data

NEEDS = (
    "keras.src.trainers.epoch_iterator:EpochIterator._enumerate_iterator(self, step)",
    "keras.src.trainers.epoch_iterator:EpochIterator._num_batches",
    "keras.src.trainers.epoch_iterator:EpochIterator._steps_seen",
    "keras.src.trainers.epoch_iterator:EpochIterator.steps_per_epoch",
)

_ENUMERATE = EpochIterator._enumerate_iterator.__code__


def left_out(distributed: Any, epoch_iterator: Any) -> Any:
    """Returns a distributed data set with empty iterators where Keras makes an iterator that it doesn't read.

    Args:
      distributed: a strategy's distributed data set.
      epoch_iterator: the caller of the distribution; Keras' epoch iterator in a model's loops.
    """
    if isinstance(distributed, tf.distribute.DistributedDataset) and array_data.is_in_order(epoch_iterator):
        distributed.__class__ = _leaving_out(type(distributed))
    return distributed


@functools.cache
def _leaving_out(kind: Any) -> type:
    def iterate(self: Any) -> Iterator[Any]:
        return iter(()) if _is_unread(sys._getframe(1)) else kind.__iter__(self)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__doc__": kind.__doc__})


def _is_unread(caller: FrameType) -> bool:
    if caller.f_code is not _ENUMERATE:
        return False
    keras_iterator = caller.f_locals["self"]
    is_at_end = keras_iterator._num_batches and keras_iterator._steps_seen >= keras_iterator._num_batches
    # At the end for the first time in this pass: another one has not begun.
    return bool(is_at_end) and keras_iterator.steps_per_epoch is None and "step" in caller.f_locals
