# SPDX-License-Identifier: Apache-2.0
"""Variables of a first call, where an update is made of several gradients: see `test_parameter_server_policies.py`."""

from __future__ import annotations

from typing import Any

import first_call_models
import pytest
from first_call_models import Compiled, Noisy, Pair, fitted, looped


@pytest.mark.parametrize("model", [Pair, Compiled])
def test_a_model_without_call_trains_as_on_one_device(strategy: Any, model: type) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, model, batch_size=8)


def test_a_seed_generator_made_in_the_first_call_is_made(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, Noisy, "mse")


@pytest.mark.parametrize("is_built", [True, False])
def test_a_custom_loop_makes_layers_and_slots(strategy: Any, is_built: bool) -> None:
    first_call_models.assert_like_one_device(strategy, looped, is_built, batch_size=40)
