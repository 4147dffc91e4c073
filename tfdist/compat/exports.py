# SPDX-License-Identifier: Apache-2.0
"""Writes SavedModels that load in any process: no task of a cluster in their devices, one variable for each of Keras.

TensorFlow writes the device of a lookup table, and the task of each variable, into the functions that save and restore
them. Another task, or another cluster, can't load such a SavedModel. There is no public way: the graph is made by a
private function that `tf.saved_model.save` and `model.export` share. `clear_tasks` changes it for good.

Keras (3.15) maps each of its variables to a second one of the exported graph, with the value of the first, and tracks
the `tf.Variable`s that the endpoints read besides. It does not find those in shards, so a session, as that of
TensorFlow Serving, would restore the second alone, and look rows up in one without a value. There is no public way: the
map is an argument of a private method. `restore_shards` changes it for good, for variables in shards only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.saved_model import save

from tfdist.compat import keras_variables, replacing

NEEDS = (
    "keras:Variable._export_to_saved_model_graph(object_map)",
    "tensorflow.python.saved_model.save:_build_meta_graph(meta_graph_def)",
)

_TASK = re.compile(r"/(job|replica|task):[^/]*")


def clear_tasks() -> None:
    """Writes SavedModels without names of tasks; devices of a task, such as "/device:GPU:0", are kept."""
    replacing.once(save, "_build_meta_graph", _clearing)


def _clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        clear_tasks_of(built[0])
        return built

    return build


def clear_tasks_of(meta_graph: Any) -> None:
    """Removes job, replica and task from all devices in a MetaGraphDef."""
    graph = meta_graph.graph_def
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            node.device = _TASK.sub("", node.device)
            # Calls of functions hold the configuration of the process: its device filters, and the collectives' leader.
            if "config_proto" in node.attr:
                node.attr["config_proto"].s = _without_cluster(node.attr["config_proto"].s)
    for saved in meta_graph.object_graph_def.nodes:
        # Writing an attribute of a part of a protocol buffer that is not set would set it.
        for kind in ("resource", "variable"):
            if saved.HasField(kind):
                part = getattr(saved, kind)
                part.device = _TASK.sub("", part.device)


def _without_cluster(serialized: bytes) -> bytes:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    for name in ("device_filters", "cluster_def"):
        config.ClearField(name)
    for name in ("collective_group_leader", "coordination_config"):
        config.experimental.ClearField(name)
    return config.SerializeToString(deterministic=True)


def restore_shards(has_shards: Callable[[Any], bool]) -> None:
    """Changes how Keras variables are exported; `has_shards` returns True for TensorFlow variables in shards."""

    def wrap(original: Any) -> Any:
        def export(variable: Any, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any) -> Any:
            stored = keras_variables.tf_variable(variable)
            if not has_shards(stored):
                return original(variable, object_map, tensor_map, options, **kwargs)
            resources = stored._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
            object_map[variable] = object_map[stored]
            return resources

        return export

    replacing.once(keras.Variable, "_export_to_saved_model_graph", wrap)
