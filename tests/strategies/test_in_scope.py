# SPDX-License-Identifier: Apache-2.0
"""Variables and optimizers in the scope of MirroredStrategy, outside of `run`, do what they do on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def strategy(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


def updated(strategy: Any, **options: Any) -> list[np.ndarray]:
    with strategy.scope():
        weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]])
        optimizer = keras.optimizers.Adam(0.1, **options)
        for step in range(4):
            optimizer.apply_gradients([(tf.constant([[1.0, -1.0], [0.5, step]]), weight)])
        return [weight.numpy(), *(np.asarray(variable.numpy()) for variable in optimizer.variables)]


class Net(keras.Model):
    """Makes its weights when it is called for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="relu")
        self.dropout = keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.hidden(inputs), training=training))


def looped(strategy: Any, is_traced: bool) -> tuple[list[float], Any]:
    """The losses of a loop without `run` that is outside of the scope, and the model."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer, mean = Net(), keras.optimizers.Adam(0.1), keras.metrics.Mean()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        mean(loss)

    step = tf.function(step) if is_traced else step
    x = np.random.default_rng(0).random((24, 5)).astype("float32")
    losses = []
    for _ in range(4):
        mean.reset_state()
        for part in np.split(np.arange(24), 3):
            step(x[part], (x[part].sum(1) * 2).astype("int64") % 3)
        losses.append(float(mean.result()))
    return losses, model


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_weights_of_first_call_are_of_the_scope_of_their_layer(strategy, is_traced: bool):
    (expected, _), (losses, model) = looped(tf.distribute.get_strategy(), is_traced), looped(strategy, is_traced)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert all(len(strategy.experimental_local_results(weight.value)) == 2 for weight in model.weights)


def test_layers_without_an_own_init_keep_their_configuration(strategy):
    class Narrow(keras.layers.Dense):
        pass

    class Sum(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.sum(inputs)

    with strategy.scope():
        assert (Narrow(units=3).get_config()["units"], Sum(name="total").name) == (3, "total")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"use_ema": True, "weight_decay": 0.1}], ids=str
)
def test_optimizer_outside_of_run_updates_as_on_one_device(strategy, options: dict[str, Any]):
    for one, many in zip(updated(tf.distribute.get_strategy(), **options), updated(strategy, **options), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-6)


def test_variables_of_replicas_are_numbers(strategy):
    with strategy.scope():
        optimizer, plain = keras.optimizers.SGD(), tf.Variable(2.5)
    optimizer.iterations.assign(3)
    assert (int(optimizer.iterations), float(plain), int(plain)) == (3, 2.5, 2)
    assert np.array(plain).tolist() == np.asarray(plain, "float64").tolist() == 2.5
    assert np.array(optimizer.iterations.value).shape == ()
