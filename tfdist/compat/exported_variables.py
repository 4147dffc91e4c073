# SPDX-License-Identifier: Apache-2.0
"""Has a SavedModel restore a Keras variable in shards into the variable that its functions read.

Keras (3.15) maps each of its variables to a second one of the exported graph, with the value of the first, and tracks
the `tf.Variable`s that the endpoints read besides. It does not find those in shards, so a session, as that of
TensorFlow Serving, would restore the second alone, and look rows up in one without a value. There is no public way: the
map is an argument of a private method. The change is permanent, and one of variables in shards only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import keras_variables, replacing

NEEDS = ("keras:Variable._export_to_saved_model_graph(object_map)",)


def install(has_shards: Callable[[Any], bool]) -> None:
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
