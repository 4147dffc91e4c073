# SPDX-License-Identifier: Apache-2.0
"""One embedded cluster of 3 workers for all checks of `parameter_server_*checks.py`, and what they have in common.

A plugin of the pytest that `test_parameter_server.py` starts: TensorFlow's context belongs to the cluster from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

NUM_WORKERS = 3
# 12 full batches of 16 and one of 11: no share is even.
BATCH = 16
COUNT = 203
STEPS = 13
RANDOM = np.random.default_rng(0)
X = RANDOM.random((COUNT, 6), np.float32)
Y = X.sum(1, keepdims=True)
IDS = np.arange(COUNT, dtype=np.float64)[:, None]


@pytest.fixture(scope="session")
def cluster() -> tfdist.ParameterServerStrategy:
    return tfdist.ParameterServerStrategy(num_workers=NUM_WORKERS, num_ps=1)


@pytest.fixture
def strategy(cluster: tfdist.ParameterServerStrategy, request: Any) -> Iterator[tfdist.ParameterServerStrategy]:
    cluster._engine.data_sharding = getattr(request, "param", "shard")
    yield cluster
    cluster._engine.data_sharding = "shard"


class Batches(keras.metrics.Metric):
    """Counts update_state, in the way that loses counts where assign_add is not atomic."""

    def __init__(self, name: str = "batches") -> None:
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        self.count.assign(self.count + 1.0)

    def result(self) -> Any:
        return tf.convert_to_tensor(self.count)


class Moment(keras.metrics.Metric):
    """The sum of the labels to a power: three of them tell which labels were seen, and how often."""

    def __init__(self, power: int) -> None:
        super().__init__(name=f"moment{power}")
        self.power = power
        self.total = self.add_variable((), "zeros", name="total", dtype="float64")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + tf.reduce_sum(tf.cast(y_true, "float64") ** self.power))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.total)


def moments(ids: Any) -> list[float]:
    return [float((np.asarray(ids, np.float64) ** power).sum()) for power in range(3)]


def compiled(
    strategy: Any,
    make: Callable[[], keras.Model],
    optimizer: Any = "adam",
    metrics: Any = lambda: ["mae"],
    **options: Any,
) -> keras.Model:
    """A model made and compiled in scope; so are its optimizer and its metrics where these are functions."""
    with strategy.scope():
        model = make()
        model.compile(
            optimizer=optimizer() if callable(optimizer) else optimizer,
            metrics=metrics() if callable(metrics) else metrics,
            **{"loss": "mse", **options},
        )
    return model


def layers() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])


def dense(strategy: Any, optimizer: Any = "adam", **options: Any) -> keras.Model:
    """A small net."""
    return compiled(strategy, layers, optimizer, **options)


def dataset(**options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, **options)


def fit(model: keras.Model, *data: Any, **options: Any) -> dict[str, list[float]]:
    if data and isinstance(data[0], np.ndarray):
        options.setdefault("batch_size", BATCH)
    return model.fit(*data, verbose=0, **options).history


class Own(keras.Model):
    """Model with steps of its own, whose logs are not all metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.batches = Batches()

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.batches]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        self.batches.update_state()
        return {"tracked": self.tracker.result(), "batches": self.batches.result(), "raw": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.batches.update_state()
        return {"batches": self.batches.result()}
