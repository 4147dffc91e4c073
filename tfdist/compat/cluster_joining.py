# SPDX-License-Identifier: Apache-2.0
"""Connection of the chief to a parameter-server cluster: the stock `_connect_to_cluster` with two differences.

* The chief joins as job localhost, its current job. The stock strategy renames its devices to job chief, and objects
  that were made before (a data set, for example) can't find their device any more.
* The parameter servers know each other's addresses: the update of a model on several servers is one function.
"""

from __future__ import annotations

import contextlib
import copy
import os

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2 as stock
from tensorflow.python.eager import context, remote
from tensorflow.python.training import server_lib

NEEDS = (
    "tensorflow.python.distribute.parameter_server_strategy_v2:_SET_SERVER_DEF_RETRIES",
    "tensorflow.python.eager.context:Context.get_server_def",
    "tensorflow.python.eager.context:Context.update_server_def(server_def)",
    "tensorflow.python.eager.context:context",
    "tensorflow.python.eager.context:ensure_initialized",
    "tensorflow.python.eager.context:set_server_def_retries",
    "tensorflow.python.eager.remote:connect_to_cluster(cluster_device_filters)",
    "tensorflow.python.training.server_lib:ClusterDeviceFilters.set_device_filters",
)

CHIEF_JOB = "localhost"
# In full, so that it means the same in the thread of a worker, whose default device is merged with it.
CHIEF_DEVICE = f"/job:{CHIEF_JOB}/replica:0/task:0/device:CPU:0"
SERVER_DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"


def join(cluster_spec: tf.train.ClusterSpec) -> None:
    """Joins this process to the cluster, as its chief, and waits for the connection.

    Args:
      cluster_spec: all tasks; the chief's job is `CHIEF_JOB`.
    """
    filters = server_lib.ClusterDeviceFilters()
    for index in range(cluster_spec.num_tasks("worker")):
        # A worker doesn't need the state of other workers.
        filters.set_device_filters("worker", index, ["/job:ps", f"/job:{CHIEF_JOB}"])
    # As the stock strategy has them: one call under way to each worker, and no asynchronous executors, so that a lost
    # worker is noticed by the call that meets it.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    remote.connect_to_cluster(cluster_spec, job_name=CHIEF_JOB, protocol="grpc", cluster_device_filters=filters)
    context.set_server_def_retries(stock._SET_SERVER_DEF_RETRIES)
    context.ensure_initialized()


def leave() -> None:
    """Takes this process out of its cluster; it can go on alone, or join another cluster.

    Else TensorFlow would register each new function with the servers, and write an error for each that has ended.
    """
    described = copy.deepcopy(context.context().get_server_def())
    for job in [job for job in described.cluster.job if job.name != CHIEF_JOB]:
        described.cluster.job.remove(job)
    described.ClearField("cluster_device_filters")
    # A server that has ended already can't be told.
    with contextlib.suppress(tf.errors.OpError):
        context.context().update_server_def(described)
