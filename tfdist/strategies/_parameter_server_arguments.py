# SPDX-License-Identifier: Apache-2.0
"""Arguments of `ParameterServerStrategy`: what they must be, and which cluster they mean."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import Cluster
from tfdist.compression import on_servers
from tfdist.policies.base import Aggregation
from tfdist.policies.compression import Compression
from tfdist.serving import embedded
from tfdist.strategies import _common

_SHARDINGS = ("shard", "replicate", "dynamic")


def find_cluster(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> Cluster | None:
    """The cluster of a resolver, or else of TF_CONFIG."""
    cluster = Cluster.from_environment() if resolver is None else embedded.cluster_of(resolver)
    if cluster is not None:
        cluster.check_parameter_server()
    return cluster


def warn_of_sizes(cluster: Cluster, num_workers: int | None, num_ps: int | None) -> None:
    """Warns of numbers that are not those of the cluster, which the strategy takes."""
    for name, job, value in (("num_workers", "worker", num_workers), ("num_ps", "ps", num_ps)):
        count = len(cluster.jobs[job])
        if value is not None and value != count:
            warnings.warn(
                f"ParameterServerStrategy({name}={value!r}) has no effect: there is a cluster already, with "
                f"{count} {job} task{'s' * (count != 1)}; give the number to what makes TF_CONFIG "
                f"(tfdist launch local --{name}={value!r}).",
                RuntimeWarning,
                stacklevel=3,
            )


def num_tasks_of(cluster: Cluster | None, job: str, embedded_tasks: int) -> int:
    """Returns the number of tasks of a job of the cluster, or of the embedded cluster if there is none."""
    return embedded_tasks if cluster is None else len(cluster.jobs[job])


def check(policies: Sequence[Any], data_sharding: str, start_timeout_secs: float, stall_timeout_secs: float) -> None:
    """Raises ValueError for what no cluster is needed to refuse."""
    if data_sharding not in _SHARDINGS:
        raise ValueError(
            f"data_sharding must be one of {', '.join(map(repr, _SHARDINGS))}. "
            f"Received: data_sharding={data_sharding!r}"
        )
    in_step = [policy for policy in policies if isinstance(policy, Aggregation)]
    if in_step and data_sharding == "dynamic":
        raise ValueError(
            'data_sharding="dynamic" gives whole batches to whoever asks first, and under '
            f'{in_step[0]!r} a batch is shared by all workers; use "shard". Received: data_sharding="dynamic", '
            f"policies={list(policies)!r}"
        )
    for policy in policies:
        if isinstance(policy, Compression):
            on_servers.check(policy.codec, f"Received: policies={list(policies)!r}")
    _common.check_timeouts(start_timeout_secs=start_timeout_secs, stall_timeout_secs=stall_timeout_secs)
