# SPDX-License-Identifier: Apache-2.0
"""tf.data's own iterator, in place of TensorFlow's iterator for several devices, where a worker has a single CPU.

TensorFlow's input library reads for every worker with an `OwnedMultiDeviceIterator`, whose background thread fetches
batches for its devices. For one CPU it has nothing to fetch, costs two threads and a copy of the buffer, and its
destructor has two defects (TensorFlow 2.21): destroyed soon after it was first read, its thread may read an iterator
that is gone, which is a segmentation fault; and it may wait up to a minute for the thread that tunes the pipeline. The
input library can do without, but the strategies for several workers don't let that option pass: there is no public way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

NEEDS = ("tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction._options",)

_DIRECTLY = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


def read_directly(distributed: Any, devices: Sequence[str]) -> Any:
    """The data set that a strategy has made without options, which from now on is read with tf.data's own iterator.

    Args:
      distributed: what `distribute_datasets_from_function` has returned.
      devices: of this worker's replicas. If it is not one CPU, nothing is changed.
    """
    if len(devices) == 1 and tf.DeviceSpec.from_string(devices[0]).device_type == "CPU":
        distributed._options = _DIRECTLY
    return distributed
