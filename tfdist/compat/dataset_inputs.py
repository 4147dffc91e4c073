# SPDX-License-Identifier: Apache-2.0
"""The data sets that a `tf.data.Dataset` was made of.

There is no public way: a data set keeps its inputs to itself.
"""

from __future__ import annotations

import tensorflow as tf

NEEDS = ("tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs",)


def of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the data sets that a data set reads from directly; an empty list for a source."""
    return dataset._inputs()
