# SPDX-License-Identifier: Apache-2.0
"""Models whose losses come from `add_loss` alone, compiled without a loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.devices

X = np.random.default_rng(0).random((40, 3), np.float32)
Y = np.random.default_rng(1).random((40, 1), np.float32)


@pytest.fixture(scope="module", params=["synchronous", "backup workers"])
def strategy(request, cpus: list[str]) -> tfdist.MirroredStrategy:
    policies = [] if request.param == "synchronous" else [tfdist.BackupWorkers(spares=0)]
    return tfdist.MirroredStrategy(cpus[:2], policies=policies)


class Endpoint(keras.layers.Layer):
    """Takes the targets as an input and adds the loss, in place of `compile(loss=...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, predicted, targets):
        self.add_loss(self.loss_fn(targets, predicted))
        return predicted


def trained(strategy: Any, run_eagerly: bool) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        x, targets = keras.Input((3,), name="x"), keras.Input((1,), name="targets")
        model = keras.Model([x, targets], Endpoint()(keras.layers.Dense(1)(x), targets))
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=run_eagerly)
    history = model.fit({"x": X, "targets": Y}, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [history, model.evaluate({"x": X, "targets": Y}, batch_size=8, verbose=0), model.get_weights()]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_losses_of_layers_alone_train_as_on_one_device(strategy, run_eagerly):
    one, many = trained(tf.distribute.get_strategy(), run_eagerly), trained(strategy, run_eagerly)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, many)
