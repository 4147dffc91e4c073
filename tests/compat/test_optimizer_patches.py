# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a model are found, and rows of gradients that all replicas look up alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.compat.keras import optimizers


def test_an_optimizer_that_is_wrapped_for_loss_scaling_counts_once():
    """mixed_float16 wraps what compile is given, and a subclass may keep it in an attribute as well."""

    class Keeping(keras.Model):
        def compile(self, optimizer, **kwargs):
            self.kept = optimizer
            super().compile(optimizer=keras.optimizers.LossScaleOptimizer(optimizer), **kwargs)

    model = Keeping()
    model.compile(keras.optimizers.SGD(0.1))
    assert [type(each).__name__ for each in optimizers.optimizers_of(model)] == ["LossScaleOptimizer"]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_rows_of_sparse_lookups_are_common(combiner, has_weights):
    """They have each id once, on one device for all examples."""
    weights = tf.SparseTensorSpec([None, 3], tf.float32) if has_weights else None
    look_up = functools.partial(tf.nn.embedding_lookup_sparse, combiner=combiner)
    assert are_common(look_up, tf.SparseTensorSpec([None, 3], tf.int64), weights) == [True]


def test_rows_of_dense_lookups_are_not_common():
    assert are_common(tf.gather, tf.TensorSpec([None], tf.int64)) == [False]


def are_common(look_up: Callable[..., tf.Tensor], *specs: Any) -> list[bool]:
    """Whether the rows of the gradient of a lookup are common, for each time that it is traced."""
    table, found = tf.Variable(tf.ones([5, 2])), []

    @tf.function
    def step(*given):
        with tf.GradientTape() as tape:
            rows = look_up(table, *given)
        found.append(optimizers.are_common_rows(tape.gradient(rows, table)))

    step.get_concrete_function(*specs)
    return found
