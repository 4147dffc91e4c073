# SPDX-License-Identifier: Apache-2.0
"""Gradient transforms: one of your own, which clips gradients by their age, beside one that is there.

python own_transform.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist


def clip_by_age(max_norm: float) -> tfdist.transforms.GradientTransform:
    """Halves the largest norm of a gradient with each update that it missed; counts the gradients that were clipped."""

    def init(variables):
        return {"clipped": tf.constant(0)}

    def update(gradients, state, info):
        bound = max_norm / 2.0 ** tf.cast(info.staleness, tf.float32)
        norm = tfdist.transforms.global_norm(gradients)
        factor = tf.minimum(1.0, bound / (norm + 1e-9))
        clipped = state["clipped"] + tf.cast(factor < 1.0, tf.int32)
        return tfdist.transforms.scaled(gradients, factor), {"clipped": clipped}

    return tfdist.transforms.GradientTransform(init, update, where="arrival", name="clip_by_age")


strategy = tfdist.ParameterServerStrategy(
    num_workers=3,
    policies=[tfdist.SoftSync(2)],
    transforms=[clip_by_age(1.0), tfdist.transforms.centralize()],
)
x = np.random.default_rng(0).normal(size=(640, 10)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x.sum(axis=1), batch_size=32, epochs=2, verbose=2)
print(strategy)
print(strategy.report())
