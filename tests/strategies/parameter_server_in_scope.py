# SPDX-License-Identifier: Apache-2.0
"""An optimizer that the chief uses by itself, outside of `run`. Run by `test_parameter_server.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from test_in_scope import updated


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"use_ema": True, "weight_decay": 0.1}], ids=str
)
def test_optimizer_on_chief_updates_as_on_one_device(strategy: Any, options: dict[str, Any]) -> None:
    for one, many in zip(updated(tf.distribute.get_strategy(), **options), updated(strategy, **options), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-6)
