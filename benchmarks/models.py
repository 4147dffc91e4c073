# SPDX-License-Identifier: Apache-2.0
"""The models that are measured, for Keras 3 and for Keras 2 (tf-keras) alike, and their data."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from sizes import SIZES, Size
from tensorflow.python.data.experimental.ops import testing

__all__ = ["SIZES", "Size", "compiled", "dataset"]


def compiled(keras: ModuleType, size: Size, accumulates: bool = False, **compile_arguments: Any) -> Any:
    """A model that trains by plain SGD on the mean squared error, built with either Keras; call it in `scope()`.

    With `accumulates` an update is the mean of 16 gradients.
    """
    accumulation = {"gradient_accumulation_steps": 16} if accumulates else {}
    sleep = [_sleep_layer(keras)] if size.sleep_secs else []
    hidden = [keras.layers.Dense(width, activation="relu") for width in size.layers[:-1]]
    model = keras.Sequential(
        [keras.layers.Input((size.features,)), *sleep, *hidden, keras.layers.Dense(size.layers[-1])]
    )
    model.compile(keras.optimizers.SGD(1e-3, **accumulation), "mse", **compile_arguments)
    return model


def dataset(size: Size, replicas: int = 1) -> tf.data.Dataset:
    """The same batch for ever: making it costs nothing, so what is measured is the training.

    Where steps sleep, a batch says for how long: worker i of n takes the batches i, i + n, ...
    """
    generator = np.random.default_rng(0)
    rows = size.batch * replicas
    x = generator.normal(size=(rows, size.features)).astype("float32")
    y = generator.normal(size=(rows, size.layers[-1])).astype("float32")
    data = tf.data.Dataset.from_tensors((x, y))
    if size.sleep_secs:
        batches = np.repeat(x[np.newaxis], len(size.sleep_secs), axis=0)
        batches[:, :, 0] = np.array(size.sleep_secs)[:, np.newaxis]
        data = tf.data.Dataset.from_tensor_slices(batches).map(lambda batch: (batch, tf.constant(y)))
    data = data.repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)


def _sleep_layer(keras: ModuleType) -> Any:
    """Sleeps, on the worker, for as many seconds as the first number of the batch says.

    Other operations of the step don't wait for it, the reading of variables among them.
    """

    class Sleep(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            # Half of it: it sleeps before the only element and before the end. A `reduce` takes 9 ms of CPU time.
            microseconds = tf.cast(x[0, 0] * 0.5e6, tf.int64)
            sleeping = tf.data.Dataset.range(1).apply(testing.sleep(microseconds))
            with tf.control_dependencies([sleeping.get_single_element()]):
                return tf.identity(x)

    return Sleep()
