# SPDX-License-Identifier: Apache-2.0
"""A training of 400 steps for test_real_slurm, with a checkpoint at each preemption.

usage: slurm_training.py multi_worker|parameter_server [evaluate]
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import tfdist

task = json.loads(os.environ["TF_CONFIG"])["task"]
attempt = int(os.environ["TFDIST_ATTEMPT"])
kind, *parts = sys.argv[1:]
keras.utils.set_random_seed(1)
strategies = {"multi_worker": tfdist.MultiWorkerMirroredStrategy, "parameter_server": tfdist.ParameterServerStrategy}
strategy = strategies[kind]()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
is_chief = task["type"] == ("worker" if kind == "multi_worker" else "chief") and task["index"] == 0


class Pace(keras.callbacks.Callback):
    """Trains slowly at first, so that there is something to preempt."""

    def on_train_batch_end(self, batch, logs=None):
        if attempt == 0 and not parts:
            time.sleep(0.1)
            if batch >= 5 and is_chief:
                pathlib.Path("batches.0").touch()


x, y = np.random.default_rng(0).random((1600, 4)).astype("float32"), np.ones((1600, 1), "float32")
resume = tfdist.callbacks.Resume("checkpoints")
model.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[Pace(), resume])
while parts and attempt == 0:
    if is_chief:
        pathlib.Path("evaluating.0").touch()
    model.evaluate(x[:64], y[:64], batch_size=4, verbose=0)
if is_chief:
    print(f"trained {int(model.optimizer.iterations.numpy())} steps", flush=True)
