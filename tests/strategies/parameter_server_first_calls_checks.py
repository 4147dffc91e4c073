# SPDX-License-Identifier: Apache-2.0
"""Variables that a step makes when it is called for the first time. Run by `test_parameter_server.py`."""

from __future__ import annotations

from typing import Any

import first_call_models
import keras
import pytest


@pytest.mark.slow
def test_a_step_of_its_own_takes_batches_without_an_axis_of_examples(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, first_call_models.fitted_with_pairs)


def test_a_model_made_outside_of_the_scope_is_named(strategy: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="misplaced")])
    with strategy.scope():
        model.compile("adam", "mse", jit_compile=False)
    with pytest.raises(
        RuntimeError, match=r"model\.fit outside of strategy\.scope\(\): the chief would train the model"
    ):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"misplaced/kernel.*made outside of it; its layer is made at \w+\.py:\d+$"),
    ):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="made outside"):
        optimizer.build(model.trainable_variables)


def test_weights_of_first_call_are_of_the_scope_of_their_layer(strategy: Any) -> None:
    _, model = first_call_models.looped_without_run(strategy, True)
    assert all("/job:ps" in weight.value.device for weight in model.weights)
