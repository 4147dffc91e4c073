# SPDX-License-Identifier: Apache-2.0
"""Optimizers and models that the chief uses by itself, outside of `run`. Run by `test_parameter_server.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from test_in_scope import looped, updated


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"use_ema": True, "weight_decay": 0.1}], ids=str
)
def test_optimizer_on_chief_updates_as_on_one_device(strategy: Any, options: dict[str, Any]) -> None:
    for one, many in zip(updated(tf.distribute.get_strategy(), **options), updated(strategy, **options), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-6)


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_weights_of_first_call_are_of_the_scope_of_their_layer(strategy: Any, is_traced: bool) -> None:
    (expected, _), (losses, model) = looped(tf.distribute.get_strategy(), is_traced), looped(strategy, is_traced)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert all("/job:ps" in weight.value.device for weight in model.weights)
