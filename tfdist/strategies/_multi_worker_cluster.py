# SPDX-License-Identifier: Apache-2.0
"""The cluster of a MultiWorkerMirroredStrategy, from TF_CONFIG or a resolver, and its registration with TensorFlow."""

from __future__ import annotations

import os
import secrets
from typing import Any

import tensorflow as tf

from tfdist import _forks, _machine, _sockets
from tfdist import cluster as clusters
from tfdist.compat.tensorflow import context
from tfdist.coordination import keepalive, rendezvous
from tfdist.coordination.quorum_client import QuorumClient
from tfdist.coordination.quorum_server import QuorumServer
from tfdist.engines.agreement import Agreement
from tfdist.launchers.supervise.notices import check_none_ended
from tfdist.policies.base import Aggregation


def find_cluster(resolver: Any) -> clusters.Cluster | None:
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


def join_workers(cluster: clusters.Cluster, start_timeout_secs: float, has_policy: bool) -> None:
    """Waits for all workers, and makes TensorFlow's context join them.

    Args:
      cluster: the cluster.
      start_timeout_secs: longest wait for the start of all workers.
      has_policy: True if a policy decides which gradients make an update.

    Raises:
      RuntimeError: TensorFlow was used before, or a worker has ended.
      TimeoutError: a worker did not start in time.
      ConnectionError: the workers have different secrets.
    """
    _check_before_context()
    if has_policy:
        # A late contribution may hold one of them, and the update must not wait for it; 0: one for each CPU.
        count = tf.config.threading.get_inter_op_parallelism_threads() or _machine.usable_cpus()
        tf.config.threading.set_inter_op_parallelism_threads(count + 1)
    check = check_none_ended({str(task) for task in cluster.training_tasks})
    rendezvous.meet(cluster, start_timeout_secs, check=check, secret=os.environ.get(clusters.JOB_SECRET_VARIABLE, ""))
    _configure_coordination(cluster, start_timeout_secs)


def _check_before_context() -> None:
    """Raises in one line the error that the stock strategy raises only after all workers have started."""
    if context.has_begun():
        received = f". Received: {made}" if (made := context.made_before()) else ""
        raise RuntimeError(
            "MultiWorkerMirroredStrategy must be built before TensorFlow is used; move it up, before the first tensor, "
            "data set or model. In a notebook, or where another strategy was built before, restart the program first"
            f"{received}"
        )


def _configure_coordination(cluster: clusters.Cluster, start_timeout_secs: float) -> None:
    """Makes TensorFlow's context join the coordination service of a cluster."""
    counts = {job: len([task for task in cluster.training_tasks if task.type == job]) for job in ("chief", "worker")}
    context.configure_coordination(
        leader=f"/job:{cluster.training_tasks[0].type}/replica:0/task:0",
        jobs={job: count for job, count in counts.items() if count},
        start_timeout_secs=start_timeout_secs,
        heartbeat_timeout_secs=keepalive.LOST_SECS,
    )


# Starts the quorum server of a MultiWorkerMirroredStrategy with a policy, and connects each worker to it.


def connect_quorum(
    policy: Aggregation, cluster: clusters.Cluster, agreement: Agreement, stall_timeout_secs: float
) -> tuple[QuorumClient, QuorumServer | None]:
    """Starts the quorum server on the chief, and connects this worker to it; all workers call it.

    Without a launcher there is no secret. The chief then draws one and shares it through the coordination service,
    which is as trustworthy as the collectives that carry the gradients.

    Args:
      policy: decides which gradients make an update.
      cluster: the cluster.
      agreement: with the other workers.
      stall_timeout_secs: longest wait of an update without progress of the workers that it waits for.

    Returns:
      This worker's client, and on the chief the server.

    Raises:
      ConnectionError: another worker was given a secret, and this one was not.
    """
    tasks, server = cluster.training_tasks, None
    names, own = [str(task) for task in tasks], os.environ.get(clusters.JOB_SECRET_VARIABLE)

    def start_server() -> dict[str, Any]:
        nonlocal server
        secret = own or secrets.token_hex(32)
        server = QuorumServer(policy, names, secret.encode())
        server.start()
        _forks.at_exit(server.close)
        return {"port": server.port, "secret": None if own else secret}

    opened = agreement.from_chief(start_server, "starting the quorum server")
    secret = opened["secret"] or own
    if secret is None:
        raise ConnectionError(
            f"{clusters.JOB_SECRET_VARIABLE} is set on {names[0]} and not here; give all workers the same, or none"
        )
    worker, (host, _) = tasks.index(cluster.task), _sockets.split_address(cluster.address(tasks[0]))
    # The chief's own name may mean nothing on its own machine.
    host = host if worker else "localhost"
    address = host, opened["port"]
    client = QuorumClient(address, worker, names, secret.encode(), stall_timeout_secs=stall_timeout_secs)
    if server is not None:
        server.on_error = client.fail
    return client, server
