# SPDX-License-Identifier: Apache-2.0
"""A model and its metrics are built before a step is traced."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.keras import models

X, Y = np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)


class Positive(keras.metrics.Metric):
    """Writes its state in one branch of a conditional and reads it in the other."""

    def __init__(self) -> None:
        super().__init__(name="positive")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        added = tf.reduce_sum(y_pred)
        tf.cond(added > 0, lambda: self.total.assign(self.total + added), lambda: self.total + 0.0)

    def result(self) -> Any:
        return tf.convert_to_tensor(self.total)


def made(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


@pytest.mark.parametrize("kind", ["dense", "weighted", "sparse"])
def test_a_metric_that_writes_in_a_conditional_is_built(kind: str) -> None:
    batch = (tf.sparse.from_dense(X) if kind == "sparse" else X, Y, *([Y[:, 0]] if kind == "weighted" else []))
    model = made(metrics=[Positive(), "mae"])
    models.build_model(model, batch)
    assert model._compile_metrics.built
    assert model._compile_loss.built
    assert [float(variable.numpy()) for variable in model.metrics_variables] == [0.0] * len(model.metrics_variables)
    model._symbolic_build(data_batch=batch)


def test_what_has_no_metrics_is_left_to_keras() -> None:
    model = made()
    models.build_model(model, (X, Y))
    assert not model.built


def test_an_error_in_the_model_is_left_to_keras() -> None:
    model = keras.Sequential([keras.layers.Dense(1), keras.layers.Conv1D(2, 3)])
    model.compile("sgd", "mse", metrics=["mae"])
    models.build_model(model, (X, Y))
    with pytest.raises(ValueError, match="conv1d"):
        model._symbolic_build(data_batch=(X, Y))
