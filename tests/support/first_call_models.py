# SPDX-License-Identifier: Apache-2.0
"""Models and loops that make variables when they are called for the first time, and comparisons with one device."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training import assert_close, batch_size, compiled

X = np.random.default_rng(0).random((40, 3), np.float32)
Y = np.random.default_rng(1).random((40, 1), np.float32)


class Pair(keras.Model):
    """Model without `call`, with two optimizers, and layers that nobody has built."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.others = keras.optimizers.Adam(0.01)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self.second(self.first(x)) - y) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.first.trainable_weights), self.first.trainable_weights, strict=True)
        )
        gradients = tape.gradient(loss, self.second.trainable_weights)
        self.others.apply_gradients(zip(gradients, self.second.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        self.tracker.update_state(tf.reduce_mean((self.second(self.first(x)) - y) ** 2))
        return {"loss": self.tracker.result()}


class Compiled(Pair):
    """Leaves to Keras an optimizer that no step uses, as GANs do."""

    def compile(self, optimizer=None, **options):
        super().compile(jit_compile=options["jit_compile"])
        self.mine = optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.second(self.first(x)) - y) ** 2)
        self.mine.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True))
        return {"loss": loss}


class Noisy(keras.Model):
    """Makes a seed generator when it is first called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.made = keras.layers.Dense(1), types.SimpleNamespace(seeds=None)

    def call(self, x, training=False):
        if training and self.made.seeds is None:
            self.made.seeds = keras.random.SeedGenerator(3)
        noise = keras.random.normal((1,), seed=self.made.seeds) * 0 if training else 0
        return self.dense(x) + noise


_TRAINER = next(base for base in keras.Model.__mro__ if base.__module__.startswith("keras.src.backend.tensorflow"))


class Mixed(_TRAINER, keras.layers.Dense):
    """A layer mixed with Keras' Trainer: it has `fit` and is no `keras.Model`."""

    def __init__(self) -> None:
        keras.layers.Dense.__init__(self, 1)
        _TRAINER.__init__(self)


class Unseeded(keras.Model):
    """Draws from Keras' own seed generator."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x) + keras.random.normal((1,))


OUTSIDE = types.SimpleNamespace()


class Seeded(keras.Model):
    """Draws from seed generators that were made outside of any scope, of which it holds one and a layer holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.noise, self.seeds = keras.layers.Dense(1), OUTSIDE.noise, OUTSIDE.held

    def call(self, x, training=False):
        if not training:
            return self.dense(x)
        drawn = [keras.random.uniform((3,), seed=seeds) for seeds in (self.seeds, OUTSIDE.seeds)]
        return self.dense(self.noise(x, training=True) * drawn[0] + drawn[1])


def fitted_with_seeds_from_outside(strategy: Any) -> Any:
    """History, weights and states of seed generators that were made outside of the scope."""
    keras.utils.clear_session()
    OUTSIDE.seeds, OUTSIDE.held = keras.random.SeedGenerator(5), keras.random.SeedGenerator(6)
    OUTSIDE.noise = keras.layers.GaussianNoise(1e-9, seed=7)
    trained = fitted(strategy, Seeded, "mse")
    states = [seeds.state.numpy() for seeds in (OUTSIDE.seeds, OUTSIDE.held, OUTSIDE.noise.seed_generator)]
    return trained, states


def fitted_without_seeds(strategy: Any, is_early: bool) -> Any:
    """History and weights of a model that draws from Keras' own seed generator, made before it or by its first step."""
    keras.utils.clear_session()
    if is_early:  # outside of the scope
        keras.utils.set_random_seed(4)
        keras.random.normal((1,))
    return fitted(strategy, Unseeded, "mse")


def fitted(strategy: Any, model: Any, loss: str | None = None, size: int = 8) -> tuple[Any, Any]:
    """(history, weights) after two epochs."""
    made = compiled(strategy, model, lambda: keras.optimizers.Adam(0.01), loss=loss, metrics=None, jit_compile=False)
    options = {"epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:10], Y[:10])}
    history = made.fit(X, Y, batch_size=batch_size(size), **options).history
    return history, made.get_weights()[:4]


def looped(strategy: Any) -> list[Any]:
    """Losses and weights after one pass of a loop in which a layer and an optimizer are called for the first time."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2")])
        optimizer = keras.optimizers.Adam(0.01)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_mean((model(x) - y) ** 2, -1))
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed(data):
        return strategy.reduce("SUM", strategy.run(lambda batch: step(*batch), args=(data,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size(10))
    batches = strategy.experimental_distribute_dataset(data)
    return [[float(distributed(batch)) for batch in batches], *model.get_weights()]


def plainly_looped(strategy: Any, in_scope: bool, in_graph: bool, is_scaled: bool = False) -> list[Any]:
    """Losses and weights after one pass of a loop without `strategy.run`."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer, metric = keras.optimizers.AdamW(0.01), keras.metrics.MeanSquaredError()
        if is_scaled:  # By so much that the first gradients are not finite.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 2.0**126, 2)
            optimizer.build(model.trainable_weights)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
            scaled = optimizer.scale_loss(loss * 8)
        gradients = [gradient / 8 for gradient in tape.gradient(scaled, model.trainable_weights)]
        optimizer.apply(gradients, model.trainable_weights)
        metric.update_state(y, model(x))
        return loss

    once = tf.function(step) if in_graph else step
    with strategy.scope() if in_scope else contextlib.nullcontext():
        losses = [float(once(x, y)) for x, y in tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)]
    scale = np.log2(float(optimizer.dynamic_scale)) if is_scaled else 0.0
    return [losses, float(metric.result()), optimizer.iterations.numpy(), scale, *model.get_weights()]


def assert_like_one_device(strategy: Any, trained: Any, *arguments: Any) -> None:
    """Trains on one device and under the strategy; compares all numbers."""
    assert_close(trained(tf.distribute.get_strategy(), *arguments), trained(strategy, *arguments))


def updated(strategy: Any) -> list[np.ndarray]:
    """A weight, and the variables of an optimizer that is called outside of `run`."""
    with strategy.scope():
        weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, use_ema=True, weight_decay=0.1)
        for step in range(4):
            optimizer.apply_gradients([(tf.constant([[1.0, -1.0], [0.5, step]]), weight)])
        return [weight.numpy(), *(np.asarray(variable.numpy()) for variable in optimizer.variables)]


class Net(keras.Model):
    """Makes its weights when it is called for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="relu")
        self.dropout = keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.hidden(inputs), training=training))


def looped_without_run(strategy: Any, is_traced: bool) -> tuple[list[float], Any]:
    """The losses of a loop without `run` that is outside of the scope, and the model."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer, mean = Net(), keras.optimizers.Adam(0.1), keras.metrics.Mean()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        mean(loss)

    step = tf.function(step) if is_traced else step
    x = np.random.default_rng(0).random((24, 5)).astype("float32")
    losses = []
    for _ in range(4):
        mean.reset_state()
        for part in np.split(np.arange(24), 3):
            step(x[part], (x[part].sum(1) * 2).astype("int64") % 3)
        losses.append(float(mean.result()))
    return losses, model


class Stacked(keras.Sequential):
    """Takes anchors and positives one above the other: the first axis of a batch is not that of examples."""

    def __init__(self) -> None:
        super().__init__([keras.Input((3,)), keras.layers.Dense(4)])

    def train_step(self, data):
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(anchors, training=True) - self(positives, training=True)) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss}


def fitted_with_pairs(strategy: Any) -> Any:
    """(losses, weights) after four epochs of one batch: steps of two could overlap."""
    options = {"loss": None, "metrics": None, "jit_compile": False}
    model = compiled(strategy, Stacked, lambda: keras.optimizers.Adam(0.01), **options)
    pairs = np.stack([X[:20], X[20:]]).reshape(2, 1, 20, 3)
    data = tf.data.Dataset.from_tensor_slices(pairs.swapaxes(0, 1))
    return model.fit(data, epochs=4, verbose=0).history, model.get_weights()
