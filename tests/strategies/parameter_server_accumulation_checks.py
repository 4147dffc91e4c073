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


@pytest.mark.parametrize("steps_per_execution", [1, 8])
def test_one_worker_trains_as_one_device_does(strategy: Any, steps_per_execution: int) -> None:
    """The batches of the first worker alone, which is given all of them."""
    some = dataset().take(12).repeat(2)

    def given(context: Any) -> tf.data.Dataset:
        return some if context.input_pipeline_id == 0 else some.take(0)

    model = dense(strategy, clipped_and_decayed)
    model.compile(clipped_and_decayed(), "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
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


def test_an_error_among_several_steps_leaves_nothing_in_the_sums(strategy: Any) -> None:
    def mean(y: Any, predicted: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(y), 1.0)]):
            return tf.reduce_mean(predicted)

    def given(*labels: float) -> Any:
        data = tf.data.Dataset.from_tensor_slices((np.zeros((len(labels), 1, 3), "f4"), np.array(labels, "f4")))
        data = data.map(lambda x, y: (x, tf.reshape(y, [1, 1])))
        return strategy.distribute_datasets_from_function(
            lambda context: data if context.input_pipeline_id == 0 else data.take(0)
        )

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(OPTIMIZERS.SGD(1.0, gradient_accumulation_steps=6), mean, steps_per_execution=8)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(given(*[0.0] * 4, 2.0, *[0.0] * 11), verbose=0)
    before = model.get_weights()[1]
    model.fit(given(*[0.0] * 12), verbose=0)
    np.testing.assert_allclose(model.get_weights()[1] - before, [-2.0], rtol=1e-5)
