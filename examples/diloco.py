# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: each worker trains alone for some steps, then an outer optimizer moves the common model.

tfdist launch local --num_workers=2 diloco.py
"""

import keras
import numpy as np

import tfdist

# 500 steps in the paper; the messages become as much rarer.
policy = tfdist.ParameterAveraging(
    every_steps=10,
    optimizer_state="local",
    outer=lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
)
strategy = tfdist.MultiWorkerMirroredStrategy(policies=[policy])

x = np.random.default_rng(0).normal(size=(1280, 10)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(0.003), "mse")

model.fit(x, x.sum(axis=1), batch_size=32, epochs=3, verbose=2)
report = strategy.report()
if tfdist.is_chief():
    print(report)
