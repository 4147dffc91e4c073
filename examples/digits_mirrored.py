# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on the devices of one machine.

python digits_mirrored.py
"""

import keras
import tensorflow as tf
from sklearn import datasets

import tfdist

# Without GPUs, two logical CPUs stand for two devices. Remove these two lines where there are GPUs.
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])

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

history = model.fit(x[:1500], y[:1500], batch_size=100, epochs=2, verbose=2)
print(strategy)
print("accuracy:", model.evaluate(x[1500:], y[1500:], verbose=0)[1])
