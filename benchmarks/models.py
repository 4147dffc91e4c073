# SPDX-License-Identifier: Apache-2.0
"""The three models that are measured, for Keras 3 and for Keras 2 (tf-keras) alike, and their data."""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Size:
    """A stack of dense layers.

    Attributes:
      features: width of the input.
      layers: widths of the layers; the last one is the output.
      batch: examples in one step of one replica, or in one closure.
    """

    features: int
    layers: tuple[int, ...]
    batch: int = 32

    @property
    def parameters(self) -> int:
        widths = (self.features, *self.layers)
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))


SIZES = {
    "tiny": Size(10, (32, 1)),
    "1M": Size(256, (768, 1024, 10)),
    "25M": Size(1024, (4096, 4096, 1000)),
}


def compiled(keras: ModuleType, size: Size, **compile_arguments: Any) -> Any:
    """A model that trains by plain SGD on the mean squared error, built with either Keras; call it in `scope()`."""
    hidden = [keras.layers.Dense(width, activation="relu") for width in size.layers[:-1]]
    model = keras.Sequential([keras.layers.Input((size.features,)), *hidden, keras.layers.Dense(size.layers[-1])])
    model.compile(keras.optimizers.SGD(1e-3), "mse", **compile_arguments)
    return model


def dataset(size: Size, replicas: int = 1) -> tf.data.Dataset:
    """The same batch for ever: making it costs nothing, so what is measured is the training."""
    generator = np.random.default_rng(0)
    rows = size.batch * replicas
    x = generator.normal(size=(rows, size.features)).astype("float32")
    y = generator.normal(size=(rows, size.layers[-1])).astype("float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)
