# SPDX-License-Identifier: Apache-2.0
"""Models, data and registry of the loops that guides write; see `guide_loops`."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

COUNT, BATCH = 27, 8
X = np.random.default_rng(0).random((COUNT, 3), np.float32)
Y = np.random.default_rng(1).random((COUNT, 1), np.float32)
LOOPS: dict[str, Callable[[Any], Any]] = {}
# Those that write files into a directory.
SAVING: dict[str, Callable[[Any, pathlib.Path], Any]] = {}


def loop(function: Any) -> Any:
    """Adds a loop to those that are run."""
    loops = SAVING if "directory" in inspect.signature(function).parameters else LOOPS
    loops[function.__name__] = function
    return function


def distributed(strategy: Any, count: int = COUNT) -> Any:
    return strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(BATCH)
    )


def compiled(strategy: Any, function: Any) -> Any:
    """A function of a loop in a graph, or as it is for parameter servers, whose `run` compiles what it is given."""
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return function if has_servers else tf.function(function)


class Net:
    """A model, its optimizer and its losses under a strategy."""

    def __init__(
        self, strategy: Any, optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1), is_deep: bool = False
    ) -> None:
        keras.utils.set_random_seed(3)
        self.strategy = strategy
        with strategy.scope():
            hidden = [keras.layers.Dense(4, "tanh")] if is_deep else []
            self.model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1, "tanh")])
            self.optimizer = optimizer()
            self.squares = keras.losses.MeanSquaredError(reduction=None)

    def loss(self, x: Any, y: Any) -> Any:
        return tf.nn.compute_average_loss(self.squares(y, self.model(x, training=True)), global_batch_size=BATCH)

    def step(self, batch: Any) -> Any:
        return self.unpacked(*batch)

    def unpacked(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def run(self, batch: Any) -> Any:
        return self.total(self.strategy.run(self.step, args=(batch,)))

    def total(self, value: Any) -> Any:
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def result(self, losses: Any) -> list[Any]:
        return [np.asarray(losses, np.float32), int(self.optimizer.iterations), *self.model.get_weights()]


def own_name(strategy: Any) -> str:
    """Tells the workers apart."""
    resolver = getattr(strategy, "cluster_resolver", None)
    return "0" if getattr(resolver, "task_id", None) is None else f"{resolver.task_type}-{resolver.task_id}"


def same_batches(monkeypatch: Any) -> None:
    """Makes all batches alike, so that their order does not matter."""
    for name in ("X", "Y"):
        monkeypatch.setitem(globals(), name, np.tile(globals()[name][:BATCH], (3, 1)))
