# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: computes in float16, with a loss scale that all workers share.

tfdist launch local --num_workers=2 mixed_precision.py
"""

import keras
import numpy as np

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
keras.mixed_precision.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(0)
x = rng.normal(size=(1280, 20)).astype("float32")
y = np.argmax(x @ rng.normal(size=(20, 5)), axis=1)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input([20]),
            keras.layers.Dense(64, "relu"),
            # In float32: a softmax of float16 loses digits.
            keras.layers.Dense(5, "softmax", dtype="float32"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(x, y, batch_size=64, epochs=3, verbose=2)
if tfdist.is_chief():
    print("computes in", model.layers[0].compute_dtype, "and keeps", model.layers[0].variable_dtype)
