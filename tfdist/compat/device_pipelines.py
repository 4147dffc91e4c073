# SPDX-License-Identifier: Apache-2.0
"""Switches tf.data's autotuning off where TensorFlow hands batches to replicas: there is nothing to tune.

For each pass over a distributed data set TensorFlow makes, besides the user's pipeline, one for each device, which
fetches that device's batches. Its options can't be set from outside. Each has a thread for tuning, and may hold up the
program when it is deleted, as `compat.array_data` tells. One function is replaced, for good and for the whole process:
who iterates later, and in which thread, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python.data.ops import multi_device_iterator_ops

from tfdist.compat import array_data, replacing


def leave_untuned() -> None:
    """Has the pipelines of devices made without autotuning from now on. Does nothing if it was called before."""
    replacing.once(multi_device_iterator_ops, "_create_device_dataset", _untuned)


def _untuned(made: Callable[..., Any]) -> Callable[..., Any]:
    def untuned(*args: Any, **kwargs: Any) -> Any:
        return array_data.without_tuning(made(*args, **kwargs))

    return untuned
