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
