# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy: several processes, each with a copy of the model, one update for all."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy as stock
from tensorflow.python.eager import context as tf_context

from tfdist import cluster as clusters
from tfdist.engines import rendezvous, watch
from tfdist.strategies import _common, chief_writes, sharing
from tfdist.strategies import agreement as agreements

_POLICY = tf.data.experimental.AutoShardPolicy
# A worker that sends no heartbeat for this long is taken for dead, and the others get an error.
_HEARTBEAT_TIMEOUT_SECS = 10


class MultiWorkerMirroredStrategy(_common.KerasSteps, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers: `tf.distribute.MultiWorkerMirroredStrategy`, made to work with Keras 3.

    Every worker runs the same script. Without TF_CONFIG it trains alone on the local devices.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; TF_CONFIG by default.
      communication_options: a `tf.distribute.experimental.CommunicationOptions`.
      policies: must be empty in this version.
      start_timeout_secs: how long to wait for all workers to come.

    Raises:
      ClusterError: the cluster's description can't be right.
      TimeoutError: a worker did not come in time; the message names it.
      ValueError: a policy was given, or a timeout that is not positive.
    """

    # None where this worker trains alone.
    _agreement: agreements.Agreement | None = None

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        policies: Sequence[Any] = (),
        start_timeout_secs: float = 300,
    ) -> None:
        _common.refuse_policies("MultiWorkerMirroredStrategy", policies)
        if not start_timeout_secs > 0:
            raise ValueError(
                f"start_timeout_secs must be positive. Received: start_timeout_secs={start_timeout_secs!r}"
            )
        cluster = _cluster(cluster_resolver)
        if cluster is None or cluster.task not in cluster.training_tasks or len(cluster.training_tasks) == 1:
            super().__init__(cluster_resolver, communication_options)
            _common.allow_functions_in_control_flow(self)
            return
        _before_context()
        rendezvous.meet(cluster, start_timeout_secs)
        _configure_coordination(cluster, start_timeout_secs)
        with _interruptible():
            super().__init__(cluster_resolver, communication_options)
        _common.allow_functions_in_control_flow(self)
        self._join(cluster)

    def _join(self, cluster: clusters.Cluster) -> None:
        agreement = self._agreement = agreements.Agreement(cluster.task, cluster.training_tasks)
        self._seed = agreements.share_random_state(agreement)
        chief_writes.install()
        agreements.tell_others_of_errors(cluster.task)
        watch.InterruptEscape(agreement.waited_for).install()
        agreement.reporter.start()
        atexit.register(agreement.reporter.stop)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Divides each batch of `dataset` among the replicas of all workers, as evenly as its size allows.

        A data set whose auto-shard policy is FILE, HINT or OFF is left to TensorFlow.
        """
        replicas = self.num_replicas_in_sync
        if options is not None or replicas == 1 or not _is_shared_by_data(dataset):
            return super().experimental_distribute_dataset(dataset, options)
        sharing.check_batched(dataset.element_spec, replicas)
        is_known = self._check_same(dataset)
        if self._agreement:
            dataset = sharing.reorder_batches(dataset, self._seed)
        parts = self._parts()
        dealt = sharing.deal(dataset, parts, replicas).prefetch(len(parts))
        distributed = self.distribute_datasets_from_function(lambda context: dealt)
        # All workers come to the end in the same step: no need to ask them in each.
        distributed._enable_get_next_as_optional = distributed._enable_get_next_as_optional and not is_known
        return distributed

    def _check_same(self, dataset: tf.data.Dataset) -> bool:
        """Whether the number of batches is known; raises ValueError where the workers have different data sets."""
        size = int(dataset.cardinality())
        if self._agreement:
            found = self._agreement.gather([f"{size} batches", *_sources(dataset)], "comparing the data sets")
            # What the data sets begin with says most: lengths of arrays, numbers of files.
            for traits in zip(*found.values(), strict=False):
                if len(set(traits)) > 1:
                    shown = ", ".join(f"{task}: {trait}" for task, trait in zip(found, traits, strict=True))
                    raise ValueError(
                        "dataset: every worker must be given the same data set, of which it takes its share; give all "
                        f"the same, or shard it yourself with AutoShardPolicy.OFF. Received: {shown}"
                    )
        return size != tf.data.UNKNOWN_CARDINALITY

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
                total = tf.distribute.Strategy.reduce(self, "SUM", tf.identity(flat), axis=None)
            for index, piece in zip(chosen, tf.split(total, [tf.size(tensors[i]) for i in chosen]), strict=True):
                sums[index] = tf.reshape(piece, tf.shape(tensors[index]))
        return sums

    def _copy_from_chief(self, variables: Sequence[Any]) -> None:
        """Gives all workers the chief's values."""
        is_chief = self._agreement is None or self._agreement.is_chief
        for variable in variables:
            value = tf.convert_to_tensor(variable)
            # Collectives add no unsigned integers and no booleans.
            value = value if value.dtype.is_floating else tf.cast(value, tf.int64)
            (total,) = self._sum_over_workers([value if is_chief else tf.zeros_like(value)])
            variable.assign(tf.cast(total, variable.dtype))


def _is_shared_by_data(dataset: Any) -> bool:
    is_dataset = isinstance(dataset, tf.data.Dataset)
    return is_dataset and dataset.options().experimental_distribute.auto_shard_policy in (_POLICY.AUTO, _POLICY.DATA)


def _sources(dataset: tf.data.Dataset) -> list[str]:
    """What this data set and those that it is made of yield."""
    return [str(dataset.element_spec), *(text for source in dataset._inputs() for text in _sources(source))]


def _cluster(resolver: Any) -> clusters.Cluster | None:
    """The cluster from TF_CONFIG or the resolver, checked; None to train alone."""
    if resolver is None:
        cluster = clusters.Cluster.from_environment()
    else:
        jobs = resolver.cluster_spec().as_dict()
        cluster = clusters.Cluster(jobs, clusters.Task(resolver.task_type, resolver.task_id)) if jobs else None
    if cluster:
        cluster.check_multi_worker()
    return cluster


def _before_context() -> None:
    """Says in one line what the stock strategy would say after the other workers had come."""
    if tf_context.context()._context_handle is not None:
        raise RuntimeError(
            "MultiWorkerMirroredStrategy must be built before TensorFlow is used; move it up, before the first tensor, "
            "data set or model"
        )


def _configure_coordination(cluster: clusters.Cluster, start_timeout_secs: float) -> None:
    counts = {job: len([task for task in cluster.training_tasks if task.type == job]) for job in ("chief", "worker")}
    tf_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{cluster.training_tasks[0].type}/replica:0/task:0",
        cluster_register_timeout_in_ms=int(start_timeout_secs * 1000),
        heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_SECS * 1000,
        coordinated_jobs=[
            stock.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count)
            for job, count in counts.items()
            if count
        ],
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within this block Ctrl-C ends the process at once: TensorFlow's start lets no Python run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
