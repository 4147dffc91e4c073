# SPDX-License-Identifier: Apache-2.0
"""The data of a strategy whose replicas train alone: `fit` reads them without asking anybody.

In `fit` every worker iterates over whole batches, of which each replica takes its part in the step; or over the parts
of its own replicas. The iterator is tf.data's, and its elements are handles that hold the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import handle as handles
from tfdist.data import splitting
from tfdist.data.shares import Part

# Forms of handles: their content is a batch of all replicas, or a tuple of the parts of this worker's replicas.
_WHOLE, _OWN = "whole", "own"


def whole_batches(engine: Any, dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
    """Returns the data set of handles that `fit` iterates over, from one of global batches.

    Raises:
      ValueError: the elements are not batches.
    """
    splitting.check_batched(dataset.element_spec, num_replicas)
    return handles.in_handles(engine, dataset, _WHOLE)


def own_parts(engine: Any, dataset: tf.data.Dataset, num_local_replicas: int) -> tf.data.Dataset:
    """The same from a data set of this worker's own, whose elements go to its replicas in turn."""
    return handles.in_handles(engine, splitting.groups_of(dataset, num_local_replicas), _OWN)


def is_plain(dataset: Any, options: Any) -> bool:
    """Returns True for a data set of global batches, which are to be divided among the replicas."""
    return options is None and isinstance(dataset, tf.data.Dataset) and tf.executing_eagerly()


def parts(handle: handles.BatchHandle, replicas: Sequence[int], num_replicas: int) -> list[Part]:
    """Returns the parts of a batch that the replicas of this worker train on.

    Args:
      handle: an element of `whole_batches` or `own_parts`.
      replicas: which parts of a whole batch they take.
      num_replicas: replicas on all workers.
    """
    content = handles.without_optionals(handle.content)
    if handle.kind.form == _WHOLE:
        with tf.device("/device:CPU:0"):
            total = splitting.rows(content)
            return [Part(splitting.cut(content, replica, num_replicas), total) for replica in replicas]
    rows = [splitting.rows(batch) for batch in content]
    is_all = len(rows) == num_replicas and None not in rows
    return [Part(batch, tf.add_n(rows) if is_all else None) for batch in content]
