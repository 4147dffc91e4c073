# SPDX-License-Identifier: Apache-2.0
"""The data sets that a `tf.data.Dataset` was made of, and the values that it was given.

There is no public way: a data set keeps its inputs and arguments to itself. (Its graph has them, with copies of all
arrays.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

NEEDS = (
    "tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs",
    "tensorflow.python.data.ops.from_tensor_slices_op:_TensorSliceDataset._tensors",
    "tensorflow.python.data.ops.from_tensors_op:_TensorDataset._tensors",
    "tensorflow.python.data.ops.readers:TextLineDatasetV2._filenames",
    "tensorflow.python.data.ops.shard_op:_ShardDataset._index",
    "tensorflow.python.data.ops.skip_op:_SkipDataset._count",
    "tensorflow.python.data.ops.take_op:_TakeDataset._count",
)
# Attributes with arrays, names of files, or numbers that choose examples.
_VALUES = ("_tensors", "_filenames", "_index", "_count")


def of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the data sets that a data set reads from directly; an empty list for a source."""
    return dataset._inputs()


def values_of(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns the arrays, names of files and numbers that a data set itself was made with, as far as they are known."""
    given: list[Any] = [value for name in _VALUES for value in tf.nest.flatten(vars(dataset).get(name))]
    # Names of files are a data set of their own, which is none of the inputs.
    found = [each for value in given for each in (values_of(value) if isinstance(value, tf.data.Dataset) else [value])]
    return [value for value in found if isinstance(value, tf.Tensor) and hasattr(value, "numpy")]
