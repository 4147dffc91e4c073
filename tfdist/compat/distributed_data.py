# SPDX-License-Identifier: Apache-2.0
"""The base classes of data sets and batches that Keras and TensorFlow take for distributed ones.

There is no public way. Keras knows a distributed data set, which it must not divide again, by the name and the module
of a private class (`is_tf_dataset` in `keras.src.trainers.data_adapters`); the public
`tf.distribute.DistributedDataset` is an interface above it. A batch that is an argument of a `tf.function` must be a
composite tensor, and the public `tf.experimental.ExtensionType` has a fixed number of fields of known dtypes.
"""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.distribute import input_lib
from tensorflow.python.framework import composite_tensor

NEEDS = (
    "keras.src.trainers.data_adapters:is_tf_dataset",
    "tensorflow.python.data.experimental.ops.distribute:compute_batch_size(dataset)",
    "tensorflow.python.distribute.input_lib:DistributedDataset._enable_get_next_as_optional",
    "tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction._cardinality",
    "tensorflow.python.distribute.input_lib:DistributedDataset._input_workers",
    "tensorflow.python.distribute.input_lib:DistributedDataset._type_spec",
    "tensorflow.python.distribute.input_lib:InputWorkers.serialize",
    "tensorflow.python.framework.composite_tensor:CompositeTensor._type_spec",
)


class DistributedDatasetBase(input_lib.DistributedDataset):
    """Base class of data sets, with no attribute of the private class's but those of the stock data set `whole`.

    As an argument of a `tf.function` it is that stock data set: TensorFlow takes it apart by its private attributes.
    """

    whole: Any

    @property
    def _type_spec(self) -> Any:
        return self.whole._type_spec

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith(("__", "_tfdist", "_make_whole")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.whole, name)


# A subclass has a property `_type_spec`.
CompositeBatch = composite_tensor.CompositeTensor


def assume_full_batches(distributed: Any) -> None:
    """Says that each batch has a part for every replica of every worker: TensorFlow would ask, for each batch."""
    distributed._enable_get_next_as_optional = False
    distributed._input_workers = copy.copy(distributed._input_workers)
    distributed._input_workers.__class__ = _WithFullBatches


class _WithFullBatches(input_lib.InputWorkers):
    """Keeps functions that were traced for full batches from being called with other data.

    TensorFlow compares the workers of data sets for that, and not if they ask. Of workers with data of different
    lengths, the one with less would end too soon, and the others would wait for it.
    """

    def serialize(self) -> tuple[Any, ...]:
        return (*super().serialize(), "full batches")


def set_length(distributed: Any, steps: int) -> None:
    """Says how many steps a pass has on all workers: TensorFlow takes the number of this worker's own elements."""
    distributed._cardinality = steps


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the size of all batches but the last, or None if TensorFlow does not know it.

    There is no public way: the shapes of a data set tell no size if the last batch may be smaller.
    """
    size: Any = distribute.compute_batch_size(dataset)
    size = int(size)
    return size if size > 0 else None
