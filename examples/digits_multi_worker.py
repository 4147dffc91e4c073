# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on several workers, synchronously.

tfdist launch local --num_workers=2 digits_multi_worker.py
"""

import keras
from sklearn import datasets

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()

keras.utils.set_random_seed(1)
digits = datasets.load_digits()
x, y = digits.images[..., None] / 16.0, digits.target

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(x[:1500], y[:1500], batch_size=100, epochs=2, verbose=2)
# All workers evaluate and save; one prints.
loss, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
model.save("digits.keras")
if tfdist.is_chief():
    print("accuracy:", accuracy)
