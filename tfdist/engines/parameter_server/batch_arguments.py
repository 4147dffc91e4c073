# SPDX-License-Identifier: Apache-2.0
"""Batches among the arguments of `strategy.run`: which step takes them, and from where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_data import Batch, WorkerIterator, find_batch


def spec_of(leaf: Any) -> Any:
    """The spec that a step is traced for: of a batch its structure, and not which batch it is."""
    if isinstance(leaf, WorkerBatch):
        return leaf.structure
    return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf


def unused(handles: Sequence[int]) -> Batch | None:
    """The one batch that these handles stand for, if it is one, and no step has had it; it counts as used then."""
    if len(set(handles)) != 1:
        return None
    batch = find_batch(handles[0])
    if batch.is_used:
        return None
    batch.is_used = True
    return batch


def parts_on_chief(numbers: Sequence[int], handles: Sequence[WorkerBatch]) -> list[Any]:
    """The values of the parts that these handles stand for, flat; `numbers` says of which batches they are."""
    parts = []
    for number, handle in zip(numbers, handles, strict=True):
        whole = tf.nest.pack_sequence_as(handle.whole_spec, find_batch(number).values(), expand_composites=True)
        parts += tf.nest.flatten(handle.pick(whole), expand_composites=True)
    return parts


def takes_batches_itself(kind: str, iterator: WorkerIterator) -> bool:
    """True if the traced step reads its batch from an iterator on the worker; else it is handed the batch.

    Where a policy has the workers read parts of batches, all other steps are handed whole ones by the chief.
    """
    return iterator.feed(by_chief=kind in ("test", "predict") or iterator.is_cut) == "worker" and iterator.shares_known
