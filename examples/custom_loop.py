# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own, with strategy.run.

tfdist launch local --num_workers=2 custom_loop.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
GLOBAL_BATCH = 64

x = np.random.default_rng(0).normal(size=(640, 10)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(GLOBAL_BATCH)
# Every worker is given the same data set; each batch is divided here.
dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)


@tf.function
def step(batch):
    def on_replica(x, y):
        with tf.GradientTape() as tape:
            # The mean over the global batch: the sum of what the replicas compute is the loss.
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return strategy.reduce("SUM", strategy.run(on_replica, args=batch), axis=None)


for epoch in range(3):
    losses = [float(step(batch)) for batch in dataset]
    if tfdist.is_chief():
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
