# SPDX-License-Identifier: Apache-2.0
"""Trains small models under a strategy and returns all numbers, to be compared with those of one device."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.passes import splitting

# 45 examples in batches of 8: the last batch has 5, which two replicas can't share evenly.
RANDOM = np.random.default_rng(0)
X = RANDOM.random((45, 3), np.float32)
Y = RANDOM.random((45, 1), np.float32)
OPTIMIZERS = keras.optimizers
# For a strategy whose workers take batches in any order: all examples are one batch.
SETTINGS = types.SimpleNamespace(in_one_batch=False)


def batch_size(size: int) -> int:
    """The size of a batch of a case that is about batches of this one."""
    return len(X) if SETTINGS.in_one_batch else size


class Logs(keras.callbacks.Callback):
    """Keeps the logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append({key: float(value) for key, value in logs.items()})


def dense_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])


def two_ends() -> keras.Model:
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = keras.layers.Concatenate()([first, second])
    outputs = {"sum": keras.layers.Dense(1, name="sum")(joined), "kind": keras.layers.Dense(4, name="kind")(joined)}
    return keras.Model({"first": first, "second": second}, outputs)


class OwnStep(keras.Model):
    """A subclassed model with its own train_step and logs, which does not call scale_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(tf.abs(y - self(x)))
        return {"own": self.mean.result(), "constant": 2.5}


def compiled(
    strategy: Any, make: Callable[[], Any] = dense_model, optimizer: str | Callable[[], Any] = "sgd", **options: Any
) -> Any:
    """A model that is made and compiled in scope, from the same seeds each time."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make()
        made = optimizer() if callable(optimizer) else optimizer
        model.compile(made, **{"loss": "mse", "metrics": ["mae"], **options})
    return model


def trained(
    strategy: Any,
    optimizer: Callable[[], Any],
    model: Callable[[], Any] = dense_model,
    calls: Sequence[str] = (),
    **options: Any,
) -> Any:
    """(weights, history, logs of batches) after 12 steps, and the results of `calls`.

    To trace a test step and a predict step takes as long as to train, so that only those tests do it which are about
    more than the update.
    """
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, **options.pop("fit", {})}
    fit["batch_size"] = batch_size(fit["batch_size"])
    data = options.pop("data", (X, Y))
    made = compiled(strategy, model, optimizer, **options)
    logs = Logs()
    history = made.fit(*data, verbose=0, callbacks=[logs], **fit).history
    after = {
        "evaluate": lambda: made.evaluate(*data[:2], batch_size=8, verbose=0, return_dict=True),
        "predict": lambda: made.predict(data[0], batch_size=8, verbose=0),
    }
    return made.get_weights(), history, logs.batches, *(after[call]() for call in calls)


def build_metrics(model: keras.Model, x: Any, y: Any) -> None:
    """Makes the variables of the metrics, which Keras makes when they are first used."""
    with model.distribute_strategy.scope():
        predicted = model(x)
        model.compute_loss(x, y, predicted)
        model.compute_metrics(x, y, predicted)
        model.reset_metrics()


def assert_close(expected: Any, found: Any) -> None:
    """Compares the numbers of two structures."""
    tf.nest.assert_same_structure(expected, found)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5), expected, found)


def assert_copies_are_equal(model: keras.Model) -> None:
    """Compares what the replicas have of a model and of its optimizer, to the bit."""
    for variable in (*model.variables, *model.optimizer.variables):
        first, *others = variable.value.values
        for copy in others:
            np.testing.assert_array_equal(first.numpy(), copy.numpy(), err_msg=variable.path)


def assert_like_one_device(strategy: Any, optimizer: Callable[[], Any], **options: Any) -> None:
    """Trains on one device and under the strategy, and compares all numbers."""
    one, many = (trained(s, optimizer, **dict(options)) for s in (tf.distribute.get_strategy(), strategy))
    for alone, together in zip(one, many, strict=True):
        assert_close(alone, together)


def weighed_within_parts(strategy: Any, num_parts: int) -> tuple[float, float]:
    """Returns a kernel after a step of a loss that each replica divides by its own weights, and the same worked out."""
    x, y, weights, rate = X[:7, :1], Y[:7], np.linspace(0.1, 2, 7, dtype=np.float32), 0.1
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(OPTIMIZERS.SGD(rate), keras.losses.MeanSquaredError("mean_with_sample_weight"))
    model.fit(x, y, sample_weight=weights, batch_size=7, shuffle=False, verbose=0)
    gradients = np.ravel(2 * (x - y) * x)
    expected = 1.0
    for part in range(num_parts):
        rows = splitting.cut(tf.range(7), part, num_parts).numpy()
        expected -= rate * len(rows) / 7 * np.average(gradients[rows], weights=weights[rows])
    return float(layer.kernel.numpy()[0, 0]), expected


def with_uneven_pipelines(strategy: Any, metric: Callable[..., Any]) -> tuple[Any, Any]:
    """Trains with whole batches, and with pipelines of each replica's own that have uneven parts of them."""

    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        index, last = context.input_pipeline_id, context.num_input_pipelines - 1
        start, size = (0, 8 - last) if index == 0 else (8 - index, 1)
        rows = [row for batch in range(0, 40, 8) for row in range(batch + start, batch + start + size)]
        return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(size)

    def trained_with(data: Any) -> Any:
        model = compiled(strategy, optimizer=lambda: OPTIMIZERS.SGD(0.1), metrics=[metric, "mae"])
        history = model.fit(data, epochs=2, verbose=0).history
        return model.get_weights(), history

    whole = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(8)
    return trained_with(whole), trained_with(strategy.distribute_datasets_from_function(own))
