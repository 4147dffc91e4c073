# SPDX-License-Identifier: Apache-2.0
"""A variable that was made outside of the scope of a ParameterServerStrategy is refused, and its line is named."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import build_metrics

from tfdist.compat import creation_lines
from tfdist.engines.parameter_server import scope_checks
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable

pytestmark = pytest.mark.devices

X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


def model(**compiled: Any) -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return made


def test_variables_made_outside_of_the_scope_are_named() -> None:
    creation_lines.remember()
    made = model()
    with pytest.raises(ValueError, match="must be made in the scope of ParameterServerStrategy") as raised:
        scope_checks.check_scope(made.train_step)
    assert "kernel" in str(raised.value)
    assert "\n" not in str(raised.value)
    # `model` makes it.
    assert str(raised.value).endswith(f"at test_scope_checks.py:{model.__code__.co_firstlineno + 1}")


@pytest.mark.parametrize("outside", ["optimizer", "metric", "nothing"])
def test_optimizers_and_metrics_have_to_be_made_in_scope_too(outside: str) -> None:
    optimizer, metric = keras.optimizers.SGD(), keras.metrics.MeanSquaredError(name="own")
    with tf.variable_creator_scope(lambda make, **kwargs: CoordinatedVariable(make(**kwargs), lambda writes: None)):
        made = model(
            optimizer=optimizer if outside == "optimizer" else "sgd",
            metrics=[metric if outside == "metric" else "mae"],
        )
        build_metrics(made, X, Y)
    expectation = contextlib.nullcontext() if outside == "nothing" else pytest.raises(ValueError, match="made outside")
    with expectation:
        scope_checks.check_scope(made.test_step)
