# SPDX-License-Identifier: Apache-2.0
"""SavedModels without names of tasks; `multi_worker_checks.py` loads one on all workers."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from tfdist.compat.keras import saving


def test_clearing_removes_tasks_and_keeps_local_devices():
    task, config = "/job:worker/replica:0/task:1", tf.compat.v1.ConfigProto(device_filters=["/job:ps"])
    config.experimental.collective_group_leader = task
    config.device_count["CPU"] = 2
    graph = meta_graph_pb2.MetaGraphDef()
    node = graph.graph_def.node.add(device=f"{task}/device:GPU:1")
    node.attr["config_proto"].s = config.SerializeToString()
    graph.graph_def.library.function.add().node_def.add(device=task)
    graph.object_graph_def.nodes.add().resource.device = f"{task}/device:CPU:0"
    graph.object_graph_def.nodes.add().user_object.identifier = "no device"
    saving.clear_tasks_of(graph)
    assert node.device == "/device:GPU:1"
    config = tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s)
    assert (list(config.device_filters), config.experimental.collective_group_leader) == ([], "")
    assert config.device_count["CPU"] == 2
    assert graph.graph_def.library.function[0].node_def[0].device == ""
    resource, other = graph.object_graph_def.nodes
    assert resource.resource.device == "/device:CPU:0"
    assert other.WhichOneof("kind") == "user_object"
