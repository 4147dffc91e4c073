# SPDX-License-Identifier: Apache-2.0
"""Training that goes on where it was: after a failure, and after SIGTERM.

tfdist launch local --num_workers=2 --max_restarts=3 resume.py
"""

import os

import keras
import numpy as np

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()

# A seed, so that the data come in the same order in each attempt.
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(640, 10)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")

# Saves every 10 steps. On SIGTERM it saves and ends with code 75, which launchers take for a preemption.
resume = tfdist.callbacks.Resume("checkpoints", save_freq=10)

# To be seen here: worker 1 is killed at step 25 of the first attempt.
is_first = os.environ.get("TFDIST_ATTEMPT") == "0"
faults = tfdist.testing.Faults([(25, "kill", "worker:1")] if is_first else [])

model.fit(x, x.sum(axis=1), batch_size=32, epochs=3, callbacks=[resume, faults], verbose=2)
if tfdist.is_chief():
    print("updates:", int(model.optimizer.iterations))
