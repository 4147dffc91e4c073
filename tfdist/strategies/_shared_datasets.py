# SPDX-License-Identifier: Apache-2.0
"""Data sets whose batches the workers of a MultiWorkerMirroredStrategy divide among themselves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat import dataset_inputs
from tfdist.data.handle import DistributedDataset
from tfdist.engines.multi_worker.agreement import Agreement

_POLICY = tf.data.experimental.AutoShardPolicy


def is_shared(dataset: Any) -> bool:
    """Returns True if the auto-shard policy of a data set lets its batches be divided; FILE, HINT and OFF don't."""
    is_dataset = isinstance(dataset, tf.data.Dataset)
    return is_dataset and dataset.options().experimental_distribute.auto_shard_policy in (_POLICY.AUTO, _POLICY.DATA)


def check_shared(dataset: Any, options: Any) -> None:
    """Raises ValueError for what a strategy with a policy is given and can't divide, unless it has made it itself."""
    if isinstance(dataset, DistributedDataset):
        return
    received = f"options={options}" if options is not None else "a data set of another AutoShardPolicy"
    raise ValueError(
        "experimental_distribute_dataset: under a policy the batches of a data set are divided among the workers; "
        "leave options away and its AutoShardPolicy at AUTO or DATA, or give each worker its own with "
        f"distribute_datasets_from_function. Received: {received}"
    )


def check_same(dataset: tf.data.Dataset, agreement: Agreement | None) -> bool:
    """Compares the workers' data sets.

    Args:
      dataset: this worker's.
      agreement: with the other workers; None for a worker alone.

    Returns:
      True if the number of batches is known.

    Raises:
      ValueError: the workers have different data sets.
    """
    size = int(dataset.cardinality())
    if agreement:
        found = agreement.gather([*_sources(dataset), f"{size} batches"], "comparing the data sets")
        # Also those of the sources: they show different lengths of arrays, or numbers of files.
        for traits in zip(*found.values(), strict=False):
            if len(set(traits)) > 1:
                shown = ", ".join(f"{task}: {trait}" for task, trait in zip(found, traits, strict=True))
                raise ValueError(
                    "dataset: every worker must be given the same data set, of which it takes its share; give all "
                    f"the same, or shard it yourself with AutoShardPolicy.OFF. Received: {shown}"
                )
    return size != tf.data.UNKNOWN_CARDINALITY


def _sources(dataset: tf.data.Dataset) -> list[str]:
    """Returns the element specs of a data set and of its sources."""
    return [str(dataset.element_spec), *(text for source in dataset_inputs.of(dataset) for text in _sources(source))]
