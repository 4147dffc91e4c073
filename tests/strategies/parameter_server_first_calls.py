# SPDX-License-Identifier: Apache-2.0
"""Variables that a step makes when it is called for the first time. Run by `test_parameter_server.py`.

With one batch per pass there is nothing asynchronous.
"""

from __future__ import annotations

from typing import Any

import first_call_models
import pytest
from first_call_models import Noisy, Pair, fitted, looped


def test_a_model_without_call_trains_as_on_one_device(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, Pair, batch_size=40)


def test_a_seed_generator_made_in_the_first_call_is_made(strategy: Any) -> None:
    first_call_models.assert_like_one_device(strategy, fitted, Noisy, "mse", batch_size=40)


@pytest.mark.parametrize("is_built", [True, False])
def test_a_custom_loop_makes_layers_and_slots(strategy: Any, is_built: bool) -> None:
    first_call_models.assert_like_one_device(strategy, looped, is_built, batch_size=40)
