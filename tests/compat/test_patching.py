# SPDX-License-Identifier: Apache-2.0
"""Attributes that tfdist puts on objects of Keras and TensorFlow, and optimizers and gradients of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import fit, optimizers

pytestmark = pytest.mark.devices


def test_keras_does_not_track_what_is_put_on_a_layer():
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    patching.put(layer, "beside", keras.layers.Dense(1))
    assert layer.beside not in layer._layers
    assert patching.get(layer, "beside") is layer.beside
    patching.remove(layer, "beside")
    assert patching.get(layer, "beside") is None


def test_tensors_and_graphs_take_attributes():
    with tf.Graph().as_default() as graph:
        tensor = tf.constant(1)
    for target in (tf.constant(1), tensor, graph):
        patching.put(target, "beside", 3)
        assert target.beside == 3


def test_what_is_kept_is_made_once():
    with tf.Graph().as_default() as graph:
        patching.setdefault(graph, "_tfdist_test", list).append(1)
        patching.setdefault(graph, "_tfdist_test", list).append(2)
    assert patching.setdefault(graph, "_tfdist_test", list) == [1, 2]


def test_attributes_are_restored_in_nested_blocks_and_after_errors():
    model = keras.Sequential([keras.layers.Dense(1)])
    with optimizers.patched_attributes([(model, "train_step", "outer"), (model, "added", 1)]):
        with pytest.raises(ZeroDivisionError), optimizers.patched_attributes([(model, "train_step", "inner")]):
            assert model.train_step == "inner"
            _ = 1 / 0
        assert model.train_step == "outer"
    assert not {"train_step", "added"} & vars(model).keys()


def test_logs_of_an_epoch_are_removed_by_their_owner_only():
    model = keras.Sequential([keras.layers.Dense(1)])
    end_first = fit.change_logs_once(model, lambda *given: {"first": 1})
    end_second = fit.change_logs_once(model, lambda *given: {"second": 2})
    end_first()
    assert vars(model).keys() >= {"_get_metrics_result_or_logs"}
    end_second()
    end_second()
    assert not vars(model).keys() & {"_get_metrics_result_or_logs"}


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
