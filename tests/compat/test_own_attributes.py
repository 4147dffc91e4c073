# SPDX-License-Identifier: Apache-2.0
"""Attributes that tfdist puts on objects of Keras and TensorFlow are neither tracked nor left behind."""

from __future__ import annotations

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
