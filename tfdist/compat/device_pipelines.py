# SPDX-License-Identifier: Apache-2.0
"""Switches tf.data's autotuning off where TensorFlow hands batches to replicas: there is nothing to tune.

For each pass over a distributed data set TensorFlow makes, besides the user's pipeline, one for each device, which
fetches that device's batches. Its options can't be set from outside. Each has a thread for tuning, and may hold up the
program when it is deleted, as `compat.array_data` tells. One function is replaced, for good and for the whole process:
who iterates later, and in which thread, is not known here.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

_NAME = "_create_device_dataset"


def leave_untuned() -> None:
    """Has the pipelines of devices made without autotuning from now on. Does nothing if it was called before."""
    made = getattr(multi_device_iterator_ops, _NAME)
    if hasattr(made, "_tfdist_untuned"):
        return

    @functools.wraps(made)
    def untuned(*args: Any, **kwargs: Any) -> Any:
        options = tf.data.Options()
        options.autotune.enabled = False
        return made(*args, **kwargs).with_options(options)

    vars(untuned)["_tfdist_untuned"] = True
    setattr(multi_device_iterator_ops, _NAME, untuned)
