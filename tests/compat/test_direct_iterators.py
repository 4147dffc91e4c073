# SPDX-License-Identifier: Apache-2.0
"""One CPU is read for with tf.data's own iterator; what this sets in TensorFlow is still what TensorFlow looks at."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

from tfdist.compat.tensorflow import inputs

pytestmark = pytest.mark.devices

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def _distributed() -> Any:
    strategy = tf.distribute.OneDeviceStrategy(CPU)
    return strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.range(5))


def _iterator(distributed: Any) -> Any:
    (worker,) = iter(distributed)._iterators
    return worker._iterator


def test_tensorflow_reads_for_one_cpu_as_for_several_devices():
    """If it doesn't any more, this library need not mend it."""
    assert isinstance(_iterator(_distributed()), multi_device_iterator_ops.OwnedMultiDeviceIterator)


def test_one_cpu_is_read_for_directly():
    distributed = inputs.read_directly(_distributed(), [CPU])
    assert isinstance(_iterator(distributed), iterator_ops.OwnedIterator)
    assert [int(element) for element in distributed] == list(range(5))

    @tf.function
    def total(iterator: Any) -> tf.Tensor:
        return next(iterator) + next(iterator)

    assert int(total(iter(distributed))) == 1


@pytest.mark.parametrize("devices", [[CPU, CPU.replace("CPU:0", "CPU:1")], [CPU.replace("CPU", "GPU")]])
def test_other_devices_are_left_to_tensorflow(devices: list[str]):
    distributed = inputs.read_directly(_distributed(), devices)
    assert isinstance(_iterator(distributed), multi_device_iterator_ops.OwnedMultiDeviceIterator)
