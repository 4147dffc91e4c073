# SPDX-License-Identifier: Apache-2.0
"""A replica to which no example of a batch falls runs a copy of one, and nothing of it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.devices

LAYERS = keras.layers
# The last batch of 4 has one example, for two replicas.
X = np.random.default_rng(0).random((9, 5, 2), np.float32)
Y = np.random.default_rng(1).random((9, 1), np.float32)


@pytest.fixture(scope="module", params=["synchronous", "backup workers"])
def strategy(request, cpus: list[str]) -> tfdist.MirroredStrategy:
    policies = [] if request.param == "synchronous" else [tfdist.BackupWorkers(spares=0)]
    return tfdist.MirroredStrategy(cpus[:2], policies=policies)


def results(strategy: Any, recurrent: Callable[[], Any]) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 2)), recurrent(), LAYERS.Flatten(), LAYERS.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    fit = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(X[:5], Y[:5]))
    evaluated = model.evaluate(X[:1], Y[:1], verbose=0)
    return [fit.history, evaluated, model.predict(X[:1], verbose=0), model.get_weights()]


RECURRENT: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: LAYERS.LSTM(3),
    "GRU, both directions": lambda: LAYERS.Bidirectional(LAYERS.GRU(3, return_sequences=True)),
    "ConvLSTM": lambda: keras.Sequential([LAYERS.Reshape((5, 2, 1)), LAYERS.ConvLSTM1D(2, 1)]),
}


@pytest.mark.parametrize("recurrent", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_train_as_on_one_device(strategy, recurrent):
    one, many = results(tf.distribute.get_strategy(), recurrent), results(strategy, recurrent)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, many)
