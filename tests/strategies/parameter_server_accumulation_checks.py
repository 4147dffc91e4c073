# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation by each worker, on one embedded cluster; run by `test_parameter_server.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import NUM_WORKERS, STEPS, Batches, dataset, dense, fit, layers

OPTIMIZERS = keras.optimizers
# Batches of each worker.
SHARES = [len(range(worker, STEPS, NUM_WORKERS)) for worker in range(NUM_WORKERS)]


def updates(strategy: Any) -> int:
    return sum(strategy.report().accepted.values())


def test_an_update_is_made_of_the_gradients_of_one_worker(strategy: Any) -> None:
    model = dense(strategy, lambda: OPTIMIZERS.Adam(0.01, gradient_accumulation_steps=3), metrics=lambda: [Batches()])
    before = updates(strategy)
    history = fit(model, dataset(), epochs=1)
    assert history["batches"] == [STEPS]
    assert int(model.optimizer.iterations) == updates(strategy) - before == sum(share // 3 for share in SHARES)


@pytest.mark.slow
def test_gradients_left_over_count_in_the_next_pass(strategy: Any) -> None:
    model = dense(strategy, lambda: OPTIMIZERS.SGD(0.05, gradient_accumulation_steps=2))
    history = fit(model, dataset(), epochs=8)
    assert int(model.optimizer.iterations) == sum(8 * share // 2 for share in SHARES)
    assert history["loss"][-1] < history["loss"][0]


def clipped_and_decayed() -> Any:
    rate = OPTIMIZERS.schedules.ExponentialDecay(0.02, 4, 0.5)
    return OPTIMIZERS.AdamW(rate, weight_decay=0.1, clipnorm=0.5, gradient_accumulation_steps=3)


def test_one_worker_trains_as_one_device_does(strategy: Any) -> None:
    """The batches of the first worker alone, which is given all of them."""
    some = dataset().take(12).repeat(2)

    def given(context: Any) -> tf.data.Dataset:
        return some if context.input_pipeline_id == 0 else some.take(0)

    model = dense(strategy, clipped_and_decayed)
    with tf.distribute.get_strategy().scope():
        alone = layers()
    alone.set_weights(model.get_weights())
    alone.compile(clipped_and_decayed(), "mse", metrics=["mae"])
    expected = fit(alone, some)
    found = fit(model, strategy.distribute_datasets_from_function(given))
    assert int(model.optimizer.iterations) == int(alone.optimizer.iterations) == 8
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
