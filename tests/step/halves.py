# SPDX-License-Identifier: Apache-2.0
"""A model's train step in two halves, over parts of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from training import build_metrics

from tfdist.passes import splitting
from tfdist.step.contribution import ReplicaContribution, add_up
from tfdist.step.split import SplitTrainStep

RANDOM = np.random.default_rng(0)
X = RANDOM.random((30, 3), np.float32)
Y = RANDOM.random((30, 1), np.float32)
NUM_PARTS = 3


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])


def made(model: Callable[[], keras.Model] = dense, optimizer: Any = "sgd", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    result = model()
    result.compile(keras.optimizers.get(optimizer), **{"loss": "mse", "metrics": ["mae"], **options})
    build_metrics(result, tf.constant(X[:2]), tf.constant(Y[:2]))
    result.optimizer.build(result.trainable_variables)
    return result


class Halves:
    """A model's train step over parts of a batch, of which only some contribute."""

    def __init__(
        self, model: keras.Model, contributors: Sequence[int] = range(NUM_PARTS), size: int | None = None
    ) -> None:
        self.model = model
        self.step = SplitTrainStep(model.train_step, NUM_PARTS, can_take_maxima=True)
        specs = [tf.TensorSpec([size, width], tf.float32) for width in (3, 1)]
        self.replicas = [
            self.step.settled(
                tf.function(self._contribute_as(part), autograph=False, input_signature=specs).get_concrete_function
            )
            for part in contributors
        ]
        self.update = tf.function(self._update, autograph=False)

    def _contribute_as(self, part: int) -> Callable[..., ReplicaContribution]:
        templates = []

        def pack(contribution: ReplicaContribution) -> list[tf.Tensor]:
            templates.append(contribution)
            return tf.nest.flatten(contribution, expand_composites=True)

        def contribute(x: tf.Tensor, y: tf.Tensor) -> ReplicaContribution:
            own, rows = splitting.cut((x, y), part, NUM_PARTS), splitting.rows((x, y))
            flat = self.step.unless_empty(tf.distribute.get_strategy(), self.step.contribute, pack, own, rows)
            return tf.nest.pack_sequence_as(templates[-1], flat, expand_composites=True)

        return contribute

    def _update(self, contributions: list[ReplicaContribution]) -> Any:
        total = add_up(contributions)
        self.step.update(total, num_contributions=len(contributions))
        for variable, count in zip(self.step.counters, total.counts, strict=True):
            variable.value.assign_add(tf.cast(count, variable.dtype))
        return self.step.logs(total)

    def contribute(self, x: np.ndarray, y: np.ndarray) -> list[ReplicaContribution]:
        return [replica(tf.constant(x), tf.constant(y)) for replica in self.replicas]

    def __call__(self, x: np.ndarray, y: np.ndarray) -> Any:
        return self.update(self.contribute(x, y))


def state(model: keras.Model) -> list[np.ndarray]:
    optimizer = [variable.numpy() for variable in model.optimizer.variables]
    return [variable.numpy() for variable in (*model.variables, *model.metrics_variables)] + optimizer


SIZES = (9, 9, 7, 2, 3)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Of even, uneven and too small sizes."""
    edges = np.cumsum((0, *SIZES))
    return [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(edges)]
