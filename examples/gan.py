# SPDX-License-Identifier: Apache-2.0
"""A GAN with its own train_step and two optimizers.

tfdist launch local --num_workers=2 gan.py
"""

import keras
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()
NOISE = 4


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential([keras.Input([NOISE]), layers.Dense(16, "relu"), layers.Dense(2)])
        self.critic = keras.Sequential([keras.Input([2]), layers.Dense(16, "relu"), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(1)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, real):
        count = tf.shape(real)[0]
        noise = keras.random.normal([count, NOISE], seed=self.seeds)
        with tf.GradientTape() as tape:
            scores = self.critic(tf.concat([self.generator(noise), real], 0))
            labels = tf.concat([tf.zeros([count, 1]), tf.ones([count, 1])], 0)
            critic_loss = self.loss_of(labels, scores)
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            generator_loss = self.loss_of(tf.ones([count, 1]), self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        return {"critic": critic_loss, "generator": generator_loss}


points = np.random.default_rng(0).normal([2.0, -1.0], 0.1, (640, 2)).astype("float32")
with strategy.scope():
    model = GAN()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
model.fit(points, batch_size=64, epochs=2, verbose=2)
