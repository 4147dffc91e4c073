# SPDX-License-Identifier: Apache-2.0
"""Numbers of replicas and workers that TensorFlow's strategies keep to themselves.

There is no public way to have them as plain numbers: `ReplicaContext.replica_id_in_sync_group` makes a tensor of the
graph that is traced, and the public `num_replicas_in_sync` is what `global_losses.counted_as_one` changes. A strategy
of several workers says nowhere which of them this process is. Nor has the default strategy, or the scope in which
`extended.update` calls a function, a public name.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

NEEDS = (
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._id_in_cluster",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._in_multi_worker_mode",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._num_workers",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._worker_device",
    "tensorflow.python.distribute.distribute_lib:ReplicaContextBase._replica_id",
    "tensorflow.python.distribute.distribute_lib:_get_default_strategy",
    "tensorflow.python.distribute.distribute_lib:get_update_replica_id",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._get_replica_id_in_sync_group",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._in_multi_worker_mode",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._num_replicas_in_sync",
)


def current() -> int:
    """The index of the replica that runs here, among those of this process; in replica context."""
    return tf.distribute.get_replica_context()._replica_id


def in_sync_group(strategy: Any, index: int) -> Any:
    """The number among all replicas of the one that has this index in this process."""
    return strategy.extended._get_replica_id_in_sync_group(index)


def count(strategy: Any) -> int:
    """Returns the number of replicas of a strategy, also while `num_replicas_in_sync` is replaced by 1."""
    return strategy.extended._num_replicas_in_sync


def has_other_workers(strategy: Any) -> bool:
    """Returns True if the strategy has replicas in other processes."""
    return strategy.extended._in_multi_worker_mode()


def worker_count(strategy: Any) -> int:
    """Returns the number of processes of a `MultiWorkerMirroredStrategy`."""
    return strategy.extended._num_workers


def worker_index(strategy: Any) -> int:
    """Returns the index of this process in a `MultiWorkerMirroredStrategy`."""
    return strategy.extended._id_in_cluster


def worker_device(strategy: Any) -> str:
    """The device of this process' own tensors: its CPU, by its name in the cluster."""
    return strategy.extended._worker_device


def default_strategy() -> tf.distribute.Strategy:
    """The strategy that is current outside of any scope."""
    return distribute_lib._get_default_strategy()


def is_updating() -> bool:
    """Returns True inside of a function that `extended.update` calls."""
    return distribute_lib.get_update_replica_id() is not None
