# SPDX-License-Identifier: Apache-2.0
"""The layers that a layer or a model consists of, and the variables that are each layer's own.

There is no public way: `model.layers` has the outermost ones, and `layer.non_trainable_variables` those of metrics and
seed generators, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

NEEDS = (
    "keras.src.layers.layer:Layer._flatten_layers",
    "keras.src.layers.layer:Layer._non_trainable_variables",
)


def layers_of(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layer itself and all layers that are parts of it."""
    yield from layer._flatten_layers()


def statistics_of(model: keras.Model) -> list[Any]:
    """Float variables, of several copies, that layers update themselves, such as BatchNormalization's statistics."""
    variables = [v for layer in layers_of(model) for v in layer._non_trainable_variables]
    unique = {id(v): v for v in variables if tf.as_dtype(v.dtype).is_floating and hasattr(v.value, "values")}
    return list(unique.values())
