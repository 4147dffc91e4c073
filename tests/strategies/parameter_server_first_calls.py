# SPDX-License-Identifier: Apache-2.0
"""Variables that a step makes when it is called for the first time. Run by `test_parameter_server.py`.

With one batch per pass there is nothing asynchronous.
"""

from __future__ import annotations

from typing import Any

import first_call_models
import keras
import pytest
from first_call_models import Compiled, Mixed, Noisy, Pair, fitted, looped, plain_loops, plainly_looped


@pytest.mark.parametrize("model", [Pair, Compiled])
def test_a_model_without_call_trains_as_on_one_device(strategy: Any, model: type) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, model, batch_size=40)


def test_a_step_of_its_own_takes_batches_without_an_axis_of_examples(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, first_call_models.fitted_with_pairs)


def test_a_seed_generator_made_in_the_first_call_is_made(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, Noisy, "mse", batch_size=40)


@pytest.mark.parametrize(("is_built", "by_name"), [(True, False), (False, False), (False, True)])
def test_a_custom_loop_makes_layers_and_slots(strategy: Any, is_built: bool, by_name: bool) -> None:
    first_call_models.assert_like_one_device(strategy, looped, is_built, by_name=by_name, batch_size=40)


def test_layer_mixed_with_trainer_is_refused_xla(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, Mixed, "mse", batch_size=40)
    with strategy.scope():
        model = Mixed()
        model.compile("adam", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True cannot hold"):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)


def test_a_model_made_outside_of_the_scope_is_named(strategy: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="misplaced")])
    with strategy.scope():
        model.compile("adam", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"misplaced/kernel.*made outside"):
        model.fit(first_call_models.X, first_call_models.Y, verbose=0)
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="made outside"):
        optimizer.build(model.trainable_variables)


@plain_loops
def test_a_loop_without_run_trains_as_on_one_device(
    strategy: Any, in_scope: bool, in_graph: bool, is_scaled: bool
) -> None:
    first_call_models.assert_like_one_device(strategy, plainly_looped, in_scope, in_graph, is_scaled)
