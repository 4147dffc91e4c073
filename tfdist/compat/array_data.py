# SPDX-License-Identifier: Apache-2.0
"""Completes the data sets that Keras makes of arrays, for strategies: what tf.data need not tune, and their size.

An iterator whose pipeline TensorFlow tunes has a thread that sleeps between looks at it, 10 ms at first and up to 60 s
later. To delete the iterator, TensorFlow wakes that thread, and only then marks the iterator as cancelled
(`CancellationManager::StartCancel` in TensorFlow 2.21 runs its callbacks first). On a busy machine the thread often
looks in between, and sleeps on for as long as the pass has taken, and with it the program, which holds Python's lock.
A pipeline that Keras makes of arrays has nothing that needs tuning.

There is no public way to see that a data set was made of arrays: Keras' data adapter alone holds them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

NEEDS = (
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter._shuffle",
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.num_batches",
    "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter._dataset",
    "keras.src.trainers.epoch_iterator:EpochIterator.data_adapter",
)


def untuned(dataset: tf.data.Dataset, epoch_iterator: Any) -> tf.data.Dataset:
    """Switches tf.data's autotuning off if Keras has made `dataset` of arrays.

    Args:
      dataset: any data set.
      epoch_iterator: the caller of the distribution; Keras' epoch iterator in a model's loops.

    Returns:
      The data set to use in its place.
    """
    if not _is_of_arrays(epoch_iterator) or not isinstance(dataset, tf.data.Dataset):
        return dataset
    return without_tuning(dataset)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, which TensorFlow does not tune."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def sized(dataset: tf.data.Dataset, epoch_iterator: Any) -> tf.data.Dataset:
    """Says how many batches Keras makes of arrays, which the data set that it makes for them does not.

    Only so is a step known to be the last one of its epoch, and its logs those of the whole epoch. For the arguments
    see `untuned`.
    """
    if not _is_of_arrays(epoch_iterator) or int(dataset.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(epoch_iterator.data_adapter.num_batches))


def count_batches_of(epoch_iterator: Any, distributed: Any) -> None:
    """Makes Keras take the number of batches from a distributed data set, if it has made `tf.data` of the user's that.

    For the first argument see `untuned`.
    """
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, TFDatasetAdapter):
        adapter._dataset = distributed


def is_in_order(epoch_iterator: Any) -> bool:
    """Returns True if the data are arrays that Keras doesn't shuffle; for the argument see `untuned`."""
    return _is_of_arrays(epoch_iterator) and not epoch_iterator.data_adapter._shuffle


def _is_of_arrays(epoch_iterator: Any) -> bool:
    return isinstance(getattr(epoch_iterator, "data_adapter", None), ArrayDataAdapter)
