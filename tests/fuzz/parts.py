# SPDX-License-Identifier: Apache-2.0
"""Random programs, composed of parts: inputs, layers, an optimizer, a train step, metrics and a data pipeline.

All that docs/strategies.md names as a difference from one device is left out: normalization by the batch, random
layers, sums over the batch, branches on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.1),
    "global clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
}


class Tied(layers.Layer):
    """x W and back: tanh(x W) W^T."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, x: Any) -> Any:
        return tf.matmul(tf.tanh(tf.matmul(x, self.kernel)), tf.convert_to_tensor(self.kernel), transpose_b=True)


class Conditional(layers.Layer):
    """x W or -x W, by the sign of a weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        return tf.cond(kernel[0, 0] > 0, lambda: tf.matmul(x, kernel), lambda: -tf.matmul(x, kernel))


class Penalty(layers.Layer):
    """Adds a loss: the mean of squares."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def _twice(x: Any, width: int) -> Any:
    del width
    dense = layers.Dense(x.shape[-1], "tanh")
    return dense(dense(x))


def _gate(x: Any, width: int) -> Any:
    return layers.Multiply()([layers.Dense(width, "sigmoid")(x), layers.Dense(width)(x)])


_LAYERS: dict[str, Callable[[Any, int], Any]] = {
    "dense": lambda x, width: layers.Dense(width, "relu")(x),
    "regularized": lambda x, width: layers.Dense(width, kernel_regularizer="l2", activity_regularizer="l1")(x),
    "constrained": lambda x, width: layers.Dense(width, kernel_constraint="unit_norm")(x),
    "twice": _twice,
    "gate": _gate,
    "tied": lambda x, width: Tied()(x),
    "conditional": lambda x, width: Conditional()(x),
    "penalty": lambda x, width: Penalty()(x),
    "residual": lambda x, width: layers.Add()([x, layers.Dense(x.shape[-1], "tanh")(x)]),
    "layer norm": lambda x, width: layers.LayerNormalization()(x),
}
_SEQUENCE_LAYERS: dict[str, Callable[[Any, int], Any]] = {
    "lstm": lambda x, width: layers.LSTM(width, return_sequences=True)(x),
    "convolution": lambda x, width: layers.Conv1D(width, 2, padding="same")(x),
    "attention": lambda x, width: layers.MultiHeadAttention(2, 3)(x, x),
}


class Stepping(keras.Model):
    """A model of a step of its own."""

    def loss_of(self, x: Any, y: Any) -> tf.Tensor:
        return tf.reduce_mean((self(x, training=True) - y) ** 2)

    def updated(self, x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return loss


class ByHand(Stepping):
    def train_step(self, data: Any) -> Any:
        return {"loss": self.updated(*data[:2])}


class ComputeLoss(ByHand):
    def loss_of(self, x: Any, y: Any) -> tf.Tensor:
        return self.compute_loss(x, y, self(x, training=True))


class ReadsKernel(ByHand):
    def loss_of(self, x: Any, y: Any) -> tf.Tensor:
        return super().loss_of(x, y) + 0.01 * tf.add_n([tf.reduce_sum(v**2) for v in self.trainable_variables])


class DecaysBefore(Stepping):
    def train_step(self, data: Any) -> Any:
        for variable in self.trainable_variables:
            variable.assign(0.99 * tf.convert_to_tensor(variable))
        return {"loss": self.updated(*data[:2])}


class ClipsAfter(Stepping):
    def train_step(self, data: Any) -> Any:
        loss = self.updated(*data[:2])
        for variable in self.trainable_variables:
            variable.assign(tf.clip_by_value(tf.convert_to_tensor(variable), -0.3, 0.3))
        return {"loss": loss}


class CountsInConditional(Stepping):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def train_step(self, data: Any) -> Any:
        tf.cond(self.count < 3, lambda: self.count.assign_add(1.0), lambda: self.count.assign(0.0))
        return {"loss": self.updated(*data[:2])}


_STEPS: dict[str, type[keras.Model]] = {
    "stock": keras.Model,
    "by hand": ByHand,
    "compute_loss": ComputeLoss,
    "reads kernel": ReadsKernel,
    "decays before": DecaysBefore,
    "clips after": ClipsAfter,
    "counts in conditional": CountsInConditional,
}
_LOSSES: dict[str, Any] = {
    "mse": "mse",
    "mae": "mae",
    "huber": "huber",
    "one number": lambda y, predicted: tf.reduce_mean((tf.cast(y, predicted.dtype) - predicted) ** 2),
}
_METRICS = ("mae", "cosine_similarity", "root_mean_squared_error", "r2_score")
_DATA = ("arrays", "batches", "whole batches", "interleave", "map", "repeat", "weighted")


class Program:
    """One random program; the same for the same seed.

    Args:
      seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        random = np.random.default_rng(seed)
        pick = lambda options: str(random.choice(list(options)))  # noqa: E731
        self._inputs = pick(["vectors", "vectors", "sequences", "tokens"])
        choice = [*_LAYERS] + ([] if self._inputs == "vectors" else [*_SEQUENCE_LAYERS])
        self._layers = [(pick(choice), int(random.integers(2, 9))) for _ in range(random.integers(1, 5))]
        self._optimizer, self._metric, self._data = pick(_OPTIMIZERS), pick(_METRICS), pick(_DATA)
        self._step = pick(["stock", "stock", *_STEPS])
        # One number can't be weighed by examples.
        self._loss = pick([each for each in _LOSSES if each != "one number" or self._data != "weighted"])
        self._batch, self._per_execution = int(random.integers(1, 9)), int(random.choice([1, 1, 1, 3]))
        self._rows = self._batch * int(random.integers(2, 5)) + int(random.integers(0, self._batch))
        shape = {"vectors": (6,), "sequences": (4, 6), "tokens": (4,)}[self._inputs]
        self._x = random.normal(size=(self._rows, *shape))
        if self._inputs == "tokens":
            self._x = random.integers(0, 11, size=(self._rows, *shape))
        self._y, self._weights = random.normal(size=(self._rows, 1)), random.random(self._rows)

    def __str__(self) -> str:
        parts = [self._inputs, *(f"{name} {width}" for name, width in self._layers), self._optimizer, self._step]
        parts += [self._loss, self._metric, self._data, f"batch {self._batch} of {self._rows}"]
        return ", ".join([*parts, f"steps_per_execution {self._per_execution}"])

    def model(self) -> keras.Model:
        """Makes and compiles the model."""
        inputs = x = keras.Input(self._x.shape[1:], dtype=self._x.dtype.name)
        x = layers.Embedding(11, 6)(x) if self._inputs == "tokens" else x
        for name, width in self._layers:
            x = {**_LAYERS, **_SEQUENCE_LAYERS}[name](x, width)
        x = layers.GlobalAveragePooling1D()(x) if len(x.shape) == 3 else x
        model = _STEPS[self._step](inputs, layers.Dense(1)(x))
        # An own step updates no metrics, which Keras refuses to show then.
        metrics: Any = [self._metric] if self._step == "stock" else None
        optimizer = _OPTIMIZERS[self._optimizer]()
        model.compile(optimizer, _LOSSES[self._loss], metrics=metrics, steps_per_execution=self._per_execution)
        return model

    def data(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `fit`: positional ones, and others."""
        options: dict[str, Any] = {"epochs": 2}
        if self._data == "arrays":
            return (self._x, self._y), {**options, "batch_size": self._batch}
        is_weighted = self._data == "weighted" and self._step == "stock"
        arrays = (self._x, self._y, self._weights) if is_weighted else (self._x, self._y)
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        if self._data == "interleave":
            rows = dataset
            dataset = tf.data.Dataset.range(2).interleave(lambda part: rows.shard(2, part), cycle_length=2)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._rows))
        dataset = dataset.batch(self._batch, drop_remainder=self._data == "whole batches")
        if self._data == "map":
            dataset = dataset.map(lambda x, y: (x, 2 * y), num_parallel_calls=2)
        if self._data == "repeat":
            return (dataset.repeat(),), {**options, "steps_per_epoch": 3}
        return (dataset,), options

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """All inputs and targets, to evaluate with."""
        return self._x, self._y
