# SPDX-License-Identifier: Apache-2.0
"""The cluster of a MultiWorkerMirroredStrategy, from TF_CONFIG or a resolver, and how TensorFlow is told of it."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfdist import cluster as clusters
from tfdist.compat import eager_context
from tfdist.runtime import cpus, rendezvous

# A worker that sends no heartbeat for this long is taken for dead, and the others get an error.
_HEARTBEAT_TIMEOUT_SECS = 10


def find(resolver: Any) -> clusters.Cluster | None:
    """Returns the cluster from TF_CONFIG or the resolver, checked; None to train alone."""
    if resolver is None:
        cluster = clusters.Cluster.from_environment()
    else:
        jobs = resolver.cluster_spec().as_dict()
        cluster = clusters.Cluster(jobs, clusters.Task(resolver.task_type, resolver.task_id)) if jobs else None
    if cluster:
        cluster.check_multi_worker()
    return cluster


def empty_resolver() -> tf.distribute.cluster_resolver.ClusterResolver:
    """Returns the resolver of a process that trains alone."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))


def meet(cluster: clusters.Cluster, start_timeout_secs: float, has_policy: bool) -> None:
    """Waits for all workers, and makes TensorFlow's context join them.

    Args:
      cluster: the cluster.
      start_timeout_secs: longest wait for the start of all workers.
      has_policy: True if a policy decides which gradients make an update.

    Raises:
      RuntimeError: TensorFlow was used before.
      TimeoutError: a worker did not start in time.
      ConnectionError: the workers have different secrets.
    """
    _check_before_context()
    if has_policy:
        # Keras' step waits in one of them while the contribution is computed in the others; 0: one for each CPU.
        count = tf.config.threading.get_inter_op_parallelism_threads() or cpus.usable()
        tf.config.threading.set_inter_op_parallelism_threads(count + 1)
    rendezvous.meet(cluster, start_timeout_secs, secret=os.environ.get(clusters.JOB_SECRET_VARIABLE, ""))
    _configure_coordination(cluster, start_timeout_secs)


def _check_before_context() -> None:
    """Raises in one line the error that the stock strategy raises only after all workers have started."""
    if eager_context.has_begun():
        raise RuntimeError(
            "MultiWorkerMirroredStrategy must be built before TensorFlow is used; move it up, before the first tensor, "
            "data set or model. In a notebook, or after another one: restart the kernel"
        )


def _configure_coordination(cluster: clusters.Cluster, start_timeout_secs: float) -> None:
    """Makes TensorFlow's context join the coordination service of a cluster."""
    counts = {job: len([task for task in cluster.training_tasks if task.type == job]) for job in ("chief", "worker")}
    eager_context.configure_coordination(
        leader=f"/job:{cluster.training_tasks[0].type}/replica:0/task:0",
        jobs={job: count for job, count in counts.items() if count},
        start_timeout_secs=start_timeout_secs,
        heartbeat_timeout_secs=_HEARTBEAT_TIMEOUT_SECS,
    )
