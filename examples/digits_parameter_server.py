# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on parameter servers, asynchronously.

python digits_parameter_server.py
tfdist launch local --num_workers=2 --num_ps=1 digits_parameter_server.py
"""

import keras
from sklearn import datasets

import tfdist

# Without a cluster this starts two workers and a parameter server on this machine.
strategy = tfdist.ParameterServerStrategy()

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
print("accuracy:", model.evaluate(x[1500:], y[1500:], verbose=0)[1])
print(strategy.report())
