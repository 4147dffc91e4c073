# SPDX-License-Identifier: Apache-2.0
"""Two threads that fit a model each, under one strategy, don't meet in what is set while a step is traced."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

X, Y = np.ones([8, 2], "float32"), np.zeros([8, 1], "float32")
pytestmark = pytest.mark.devices


class OwnStep(keras.Sequential):
    """A model with a step of its own, during which the strategy says that it has one replica."""

    def __init__(self, layers, inside, go_on):
        super().__init__(layers)
        self._inside, self._go_on = inside, go_on

    def train_step(self, data):
        self._inside.set()
        self._go_on.wait(60)
        return super().train_step(data)


class Meeting(keras.layers.Layer):
    """While it is traced on a replica, gives another thread the time to be inside of a step of its own."""

    def __init__(self, reached, inside):
        super().__init__()
        self._reached, self._inside = reached, inside

    def call(self, x):
        if not tf.distribute.in_cross_replica_context():
            self._reached.set()
            self._inside.wait(2)
        return x


def test_a_step_traced_beside_an_own_step_divides_its_loss(cpus):
    reached, inside, done = threading.Event(), threading.Event(), threading.Event()
    strategy = tfdist.MirroredStrategy(cpus[:2])
    dense = {"units": 1, "kernel_initializer": "ones", "use_bias": False}
    with strategy.scope():
        plain = keras.Sequential([keras.Input([2]), Meeting(reached, inside), keras.layers.Dense(**dense)])
        own = OwnStep([keras.Input([2]), keras.layers.Dense(**dense)], inside, done)
        for model in (plain, own):
            model.compile(keras.optimizers.SGD(0.01), "mse")

    @tf.function
    def step(x, y):
        # A second fit would be refused.
        return strategy.run(own.train_step, ((x, y),))

    beside = threading.Thread(target=lambda: reached.wait(60) and step.get_concrete_function(X, Y))
    beside.start()
    try:
        plain.fit(X, Y, batch_size=8, verbose=0)
    finally:
        done.set()
        beside.join()
    # The gradient of the mean of (x w)^2 is 4 for each weight: 1 - 0.01 * 4.
    np.testing.assert_allclose(plain.get_weights()[0].ravel(), [0.96, 0.96], rtol=1e-5)
