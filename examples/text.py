# SPDX-License-Identifier: Apache-2.0
"""Text with TextVectorization: raw strings in, whether the text is about the sea out.

tfdist launch local --num_workers=2 text.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()

rng = np.random.default_rng(0)
sea, land = ["wave", "sail", "tide", "reef", "gull"], ["hill", "field", "barn", "wood", "lane"]
labels = rng.integers(0, 2, 640)
texts = [" ".join(rng.choice(sea if label else land, 6)) for label in labels]

# Adapted outside of the scope, before the data set is made: every worker sees the same texts.
vectorize = keras.layers.TextVectorization(max_tokens=50, output_sequence_length=8)
vectorize.adapt(texts)
dataset = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(32).map(lambda text, y: (vectorize(text), y))

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input([8], dtype="int64"),
            keras.layers.Embedding(50, 8),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])

history = model.fit(dataset, epochs=3, verbose=2)
if tfdist.is_chief():
    print("accuracy:", history.history["accuracy"][-1])
