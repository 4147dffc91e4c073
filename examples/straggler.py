# SPDX-License-Identifier: Apache-2.0
"""A worker that is slow now and then, and a spare that makes up for it.

python straggler.py
"""

import keras
import numpy as np

import tfdist

strategy = tfdist.ParameterServerStrategy(num_workers=3, policies=[tfdist.BackupWorkers(spares=1)])

x = np.random.default_rng(0).normal(size=(640, 10)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")

# Worker 1 is late by 0.5 s for every fourth gradient.
with tfdist.testing.Delays({"worker:1": tfdist.testing.stalls(secs=0.5, every=4)}):
    model.fit(x, x.sum(axis=1), batch_size=32, epochs=2, verbose=2)

# Who contributed to how many updates, and whose gradients were dropped.
print(strategy.report())
