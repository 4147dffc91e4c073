# SPDX-License-Identifier: Apache-2.0
"""Variables and optimizers in the scope of MirroredStrategy, outside of `run`, do what they do on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from first_call_models import looped_without_run

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_weights_of_first_call_are_of_the_scope_of_their_layer(strategy, is_traced: bool):
    _, model = looped_without_run(strategy, is_traced)
    assert all(len(strategy.experimental_local_results(weight.value)) == 2 for weight in model.weights)


def test_layers_without_an_own_init_keep_their_configuration(strategy):
    class Narrow(keras.layers.Dense):
        pass

    class Sum(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.sum(inputs)

    with strategy.scope():
        assert (Narrow(units=3).get_config()["units"], Sum(name="total").name) == (3, "total")


def test_variables_of_replicas_are_numbers(strategy):
    with strategy.scope():
        optimizer, plain = keras.optimizers.SGD(), tf.Variable(2.5)
    optimizer.iterations.assign(3)
    assert (int(optimizer.iterations), float(plain), int(plain)) == (3, 2.5, 2)
    assert np.array(plain).tolist() == np.asarray(plain, "float64").tolist() == 2.5
    assert np.array(optimizer.iterations.value).shape == ()
