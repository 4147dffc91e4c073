# SPDX-License-Identifier: Apache-2.0
"""Gradients sent as their largest values, with error feedback.

tfdist launch local --num_workers=2 compression.py
"""

import keras
import numpy as np

import tfdist

# A hundredth of the values of each gradient; the rest is kept and added to the next gradient.
codec = tfdist.compression.TopK(0.01)
strategy = tfdist.MultiWorkerMirroredStrategy(policies=[tfdist.Compression(codec)])

x = np.random.default_rng(0).normal(size=(1280, 50)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([50]), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")

model.fit(x, x.sum(axis=1), batch_size=64, epochs=2, verbose=2)
sent = strategy.report().message_bytes
if tfdist.is_chief():
    whole = 4 * model.count_params() * int(model.optimizer.iterations)
    print(f"sent {sum(sent.values()):,} bytes by both workers; gradients of float32 are {2 * whole:,}")
