# SPDX-License-Identifier: Apache-2.0
"""Arguments of `strategy.run`, and the batches among them: their specs, their values, and the step that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_data import Batch, WorkerIterator, find_batch


def in_tensors(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Replaces NumPy arrays by tensors, so that a step is not traced for each of their values."""
    to_tensor = lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
    return tf.nest.map_structure(to_tensor, (args, kwargs))


def spec_of(leaf: Any) -> Any:
    """Returns the spec that a step is traced for: for a batch its kind, without its number."""
    if isinstance(leaf, WorkerBatch):
        return leaf.kind.spec
    return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf


def unused(handles: Sequence[int]) -> Batch | None:
    """Returns the batch of these handles and marks it as used; None if they have several, or it was used before."""
    if len(set(handles)) != 1:
        return None
    batch = find_batch(handles[0])
    if batch.is_used:
        return None
    batch.is_used = True
    return batch


def parts_on_chief(numbers: Sequence[int], handles: Sequence[WorkerBatch]) -> list[Any]:
    """Returns the values of the parts that these handles stand for, flat; `numbers` are the batches' numbers."""
    parts = []
    for number, handle in zip(numbers, handles, strict=True):
        whole = tf.nest.pack_sequence_as(handle.whole_spec, find_batch(number).values(), expand_composites=True)
        parts += tf.nest.flatten(handle.pick(whole), expand_composites=True)
    return parts


def takes_batches_itself(kind: str, iterator: WorkerIterator) -> bool:
    """Returns True if the traced step reads its batch from an iterator on the worker; else the batch is an argument.

    If a policy makes the workers read parts of batches, the chief sends whole batches to all other steps.
    """
    return iterator.feed(by_chief=kind in ("test", "predict") or iterator.is_cut) == "worker" and iterator.shares_known
