# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a model are found, and rows of gradients that all replicas look up alike."""

from __future__ import annotations

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
    table = tf.Variable(tf.ones([5, 2]))
    weights = tf.SparseTensorSpec([None, 3], tf.float32) if has_weights else None
    found = []

    def look_up(ids, weights):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup_sparse(table, ids, weights, combiner=combiner)
        found.append(optimizers.are_common_rows(tape.gradient(rows, table)))

    tf.function(look_up).get_concrete_function(tf.SparseTensorSpec([None, 3], tf.int64), weights)
    assert found == [True]


def test_rows_of_dense_lookups_are_not_common():
    table = tf.Variable(tf.ones([5, 2]))
    found = []

    def look_up(ids):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
        found.append(optimizers.are_common_rows(tape.gradient(rows, table)))

    tf.function(look_up).get_concrete_function(tf.TensorSpec([None], tf.int64))
    assert found == [False]
