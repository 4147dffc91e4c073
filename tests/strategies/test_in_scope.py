# SPDX-License-Identifier: Apache-2.0
"""Variables and optimizers in the scope of MirroredStrategy, outside of `run`, do what they do on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from first_call_models import X, Y, assert_like_one_device, looped_without_run

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


def test_weights_of_first_call_are_of_the_scope_of_their_layer(strategy):
    _, model = looped_without_run(strategy, True)
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


def _adapted_and_quantized(strategy: Any) -> list[Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    for layer in model.layers:
        layer.enable_lora(2)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(X, Y, batch_size=9, shuffle=False, epochs=2, verbose=0).history["loss"]
    adapted = model.get_weights()
    model.quantize("int8")
    return [losses, *adapted, *model.get_weights(), model.predict(X, verbose=0)]


@pytest.mark.slow
def test_lora_and_quantization_outside_of_the_scope_are_in_it(strategy):
    assert_like_one_device(strategy, _adapted_and_quantized)


def test_calls_that_use_all_replicas_are_refused_within_run(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"train_on_batch uses all replicas.*outside of strategy\.run, or give.*$"
    ) as raised:
        strategy.run(model.train_on_batch, args=(X, Y))
    assert "\n" not in str(raised.value)


def test_loop_over_layers_in_and_outside_of_the_scope_is_refused(strategy):
    outside = keras.layers.Dense(2, name="outside")
    outside.build((None, 3))
    with strategy.scope():
        model, optimizer = (
            keras.Sequential([keras.Input((3,)), outside, keras.layers.Dense(1)]),
            keras.optimizers.Adam(),
        )
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    with pytest.raises(ValueError, match=r"variable 'outside/kernel'.*its layer is made at test_in_scope\.py:\d+$"):
        optimizer.apply(gradients, model.trainable_variables)
