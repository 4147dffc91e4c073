# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy: one process, a copy of the model on each of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies import _common, order, sharing


class MirroredStrategy(_common.KerasSteps, tf.distribute.MirroredStrategy):
    """Synchronous training on the devices of one machine: `tf.distribute.MirroredStrategy`, mended for Keras 3.

    Args:
      devices: device names such as `["GPU:0", "GPU:1"]`; all GPUs by default, or the CPU where there are none.
      cross_device_ops: how gradients are reduced, a `tf.distribute.CrossDeviceOps`.
      policies: must be empty in this version.

    Raises:
      ValueError: a policy was given.
    """

    def __init__(self, devices: Any = None, cross_device_ops: Any = None, *, policies: Sequence[Any] = ()) -> None:
        _common.refuse_policies("MirroredStrategy", policies)
        super().__init__(devices, cross_device_ops)
        _common.allow_functions_in_control_flow(self)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica."""
        if self.num_replicas_in_sync > 1:
            order.mirrored_trains()
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Divides each batch of `dataset` among the replicas, as evenly as its size allows."""
        replicas = self.num_replicas_in_sync
        if replicas > 1:
            order.mirrored_trains()
        if options is not None or replicas == 1 or not isinstance(dataset, tf.data.Dataset):
            return super().experimental_distribute_dataset(dataset, options)
        sharing.check_batched(dataset.element_spec, replicas)
        size = sharing.static_size(dataset.element_spec)
        if size is not None and size % replicas == 0:
            return super().experimental_distribute_dataset(dataset, options)
        dealt = sharing.deal(dataset, range(replicas), replicas).prefetch(replicas)
        return self.distribute_datasets_from_function(lambda context: dealt)
