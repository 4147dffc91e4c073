# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy: several processes, each with a copy of the model, one update for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import cluster as clusters
from tfdist.strategies import _common, sharing


class MultiWorkerMirroredStrategy(_common.KerasSteps, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers: `tf.distribute.MultiWorkerMirroredStrategy`, made to work with Keras 3.

    Every worker runs the same script. Without TF_CONFIG it trains alone on the local devices.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; TF_CONFIG by default.
      communication_options: a `tf.distribute.experimental.CommunicationOptions`.
      policies: must be empty in this version.
      start_timeout_secs: how long to wait for all workers to come.

    Raises:
      ClusterError: TF_CONFIG can't be right.
      ValueError: a policy was given, or a timeout that is not positive.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        policies: Sequence[Any] = (),
        start_timeout_secs: float = 300,
    ) -> None:
        _common.refuse_policies("MultiWorkerMirroredStrategy", policies)
        cluster = clusters.Cluster.from_environment() if cluster_resolver is None else None
        if cluster:
            cluster.check_multi_worker()
        super().__init__(cluster_resolver, communication_options)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Divides each batch of `dataset` among the replicas of all workers, as evenly as its size allows."""
        replicas = self.num_replicas_in_sync
        if options is not None or replicas == 1 or not _is_shared_by_data(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        sharing.check_batched(dataset.element_spec, replicas)
        parts = self._parts()
        dealt = sharing.deal(dataset, parts, replicas).prefetch(len(parts))
        return self.distribute_datasets_from_function(lambda context: dealt)

    def _parts(self) -> range:
        # The order in which Keras' predict puts the replicas of several workers together.
        return range(self.extended._id_in_cluster, self.num_replicas_in_sync, self.extended._num_workers)

    def _sum_over_workers(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not self.extended._in_multi_worker_mode():
            return list(tensors)
        sums: list[Any] = list(tensors)
        for dtype in sorted({tensor.dtype.name for tensor in tensors}):
            chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
            flat = tf.concat([tf.reshape(tensors[index], [-1]) for index in chosen], 0)
            with tf.device(self.extended._worker_device):
                total = tf.distribute.MultiWorkerMirroredStrategy.reduce(self, "SUM", tf.identity(flat), axis=None)
            for index, piece in zip(chosen, tf.split(total, [tf.size(tensors[i]) for i in chosen]), strict=True):
                sums[index] = tf.reshape(piece, tf.shape(tensors[index]))
        return sums


def _is_shared_by_data(dataset: Any) -> bool:
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy in (tf.data.experimental.AutoShardPolicy.AUTO, tf.data.experimental.AutoShardPolicy.DATA)
