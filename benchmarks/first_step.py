# SPDX-License-Identifier: Apache-2.0
"""The time from the first call of `fit` to the end of its first step.

`measure` runs this file in a fresh process for each model and contender, in turn. CPU time is compared, because what
else the machine does changes it least.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import child
from absl import app, flags

MODELS = ("embeddings", "dense", "cnn", "lstm", "vae", "steps_per_execution")
CONTENDERS = ("tfdist", "stock", "one_device")
# Fails under the stock strategy of TensorFlow 2.21 and Keras 3.15, and is shown beside one device.
WITHOUT_STOCK = ("steps_per_execution",)
MOST_RATIO = 1.5
_DEVICES = 2
# The last batch of 64 is a part of one, as in most data.
_ROWS = 650
_LIMIT_SECS = 300.0

FLAGS = flags.FLAGS


def measure(rounds: int, progress: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """Starts every contender so many times with every model.

    Returns:
      By model and contender: CPU seconds in each round.
    """
    found: dict[str, dict[str, list[float]]] = {model: {name: [] for name in CONTENDERS} for model in MODELS}
    for number in range(rounds):
        for model in MODELS:
            for contender in CONTENDERS:
                if contender == "stock" and model in WITHOUT_STOCK:
                    continue
                progress(f"first step: {model}, {contender}, {number + 1} of {rounds}")
                arguments = [f"--model={model}", f"--contender={contender}"]
                found[model][contender].append(child.result(__file__, arguments, _LIMIT_SECS))
    return found


def summary(report: dict[str, dict[str, list[float]]]) -> str:
    """A line for each model."""
    lines = [f"{'first step, CPU s':20}  " + "  ".join(f"{name:>10}" for name in CONTENDERS) + "  ratio  target"]
    for model, secs in report.items():
        shown = "  ".join(f"{statistics.median(secs[name]) if secs[name] else '':10.4}" for name in CONTENDERS)
        ratios = [ours / theirs for ours, theirs in zip(secs["tfdist"], secs["stock"], strict=False)]
        ratio = statistics.median(ratios) if ratios else None
        judged = f"{ratio:5.2f}  <= {MOST_RATIO}{'  MISSED' if ratio > MOST_RATIO else ''}" if ratio else ""
        lines.append(f"{model:20}  {shown}  {judged}".rstrip())
    return "\n".join(lines)


def _first_step(name: str, contender: str) -> float:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    devices = [tf.config.LogicalDeviceConfiguration()] * _DEVICES
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    names = [f"CPU:{index}" for index in range(_DEVICES)]
    strategy = {
        "tfdist": lambda: tfdist.MirroredStrategy(names),
        "stock": lambda: tf.distribute.MirroredStrategy(names),
        "one_device": tf.distribute.get_strategy,
    }[contender]()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = _model(keras, np, tf, name)

    class Clock(keras.callbacks.Callback):
        """Takes the time when the logs of the first step are there."""

        secs = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            tf.nest.map_structure(np.asarray, logs)
            if not self.secs:
                self.secs = time.process_time() - began
                self.model.stop_training = True

    clock = Clock()
    began = time.process_time()
    model.fit(x, y, batch_size=64, epochs=1, verbose=0, callbacks=[clock])
    return clock.secs


def _model(keras: Any, np: Any, tf: Any, name: str) -> tuple[Any, Any, Any]:
    """A compiled model, and arrays to fit."""
    layers, random, rows = keras.layers, np.random.default_rng(0), _ROWS
    x, y = random.random((rows, 32), np.float32), random.random((rows, 1), np.float32)
    if name == "embeddings":
        model = _recommender(keras)
        model.compile("adam", "binary_crossentropy")
        return model, random.integers(0, 100, (rows, 2)), y
    if name == "vae":
        model = _autoencoder(keras, tf)
        model.compile("adam")
        return model, x, None
    if name == "cnn":
        x, y = random.random((rows, 28, 28, 1), np.float32), random.integers(0, 10, rows)
        convolutions = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D()]
        head = [layers.Flatten(), layers.Dropout(0.5), layers.Dense(10, "softmax")]
        model = keras.Sequential([keras.Input((28, 28, 1)), *convolutions, layers.BatchNormalization(), *head])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model, x, y
    if name == "lstm":
        x = random.integers(0, 100, (rows, 20))
        model = keras.Sequential([keras.Input((20,)), layers.Embedding(100, 16), layers.LSTM(16), layers.Dense(1)])
        model.compile("adam", "mse")
        return model, x, y
    inputs = keras.Input((32,))
    hidden = layers.Dense(64, "relu")(layers.Dense(64, "relu")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=4 if name == "steps_per_execution" else 1)
    # Under the stock strategy it can't be built within the loop of several steps.
    model.optimizer.build(model.trainable_variables)
    return model, x, y


def _recommender(keras: Any) -> Any:
    class Recommender(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = (
                keras.layers.Embedding(100, 50, embeddings_regularizer="l2", embeddings_initializer="he_normal")
                for _ in range(2)
            )
            self.user_bias, self.item_bias = keras.layers.Embedding(100, 1), keras.layers.Embedding(100, 1)

        def call(self, inputs: Any) -> Any:
            user, item = inputs[:, 0], inputs[:, 1]
            match = keras.ops.tensordot(self.users(user), self.items(item), 2)
            return keras.ops.sigmoid(match + self.user_bias(user) + self.item_bias(item))

    return Recommender()


def _autoencoder(keras: Any, tf: Any) -> Any:
    class Sampling(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, inputs: Any) -> Any:
            mean, deviation = inputs
            return mean + keras.ops.exp(0.5 * deviation) * keras.random.normal(keras.ops.shape(mean), seed=self.seeds)

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            inputs = keras.Input((32,))
            hidden = keras.layers.Dense(16, "relu")(inputs)
            mean, deviation = keras.layers.Dense(4)(hidden), keras.layers.Dense(4)(hidden)
            self.encoder = keras.Model(inputs, [mean, deviation, Sampling()([mean, deviation])])
            self.decoder = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(32, "sigmoid")]
            )
            self.total, self.divergence = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="divergence")

        # The stock strategy trains no model without it.
        def call(self, inputs: Any) -> Any:
            return self.decoder(self.encoder(inputs)[2])

        @property
        def metrics(self) -> list[Any]:
            return [self.total, self.divergence]

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                mean, deviation, sampled = self.encoder(data)
                divergence = -0.5 * tf.reduce_mean(1 + deviation - tf.square(mean) - tf.exp(deviation))
                loss = tf.reduce_mean(tf.square(self.decoder(sampled) - data)) + divergence
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.total.update_state(loss)
            self.divergence.update_state(divergence)
            return {metric.name: metric.result() for metric in self.metrics}

    return Autoencoder()


def _main(argv: list[str]) -> None:
    del argv
    pathlib.Path(FLAGS.result).write_text(json.dumps(_first_step(FLAGS.model, FLAGS.contender)))


if __name__ == "__main__":
    flags.DEFINE_enum("model", None, MODELS, "What to train.", required=True)
    flags.DEFINE_enum("contender", None, CONTENDERS, "What to train under.", required=True)
    flags.DEFINE_string("result", None, "File to write the result to.", required=True)
    app.run(_main)
