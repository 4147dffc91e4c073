# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model on parts of real batches: which are sparse, how many rows they have, and their squared norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.advisor.profile import Table

# A sparse gradient is added up in a dense tensor only below this size.
_MOST_DENSE_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Tables of a model with the rows that the gradient of one batch has."""

    tables: tuple[Table, ...]

    @property
    def names(self) -> set[str]:
        """Paths of the tables' variables."""
        return {table.name for table in self.tables}


def of(model: Any, batch: Any) -> list[Any]:
    """Returns the gradients of a batch with respect to the trainable variables; None where there is none."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
    variables = [variable.value for variable in model.trainable_variables]
    return tape.gradient(loss, variables)


def sparse(model: Any, batch: Any) -> Sparse:
    """Finds tables: variables whose gradient has rows (`tf.IndexedSlices`)."""
    tables = []
    for variable, gradient in zip(model.trainable_variables, of(model, batch), strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            rows = int(tf.size(tf.unique(tf.reshape(gradient.indices, [-1]))[0]))
            row_bytes = bytes_of(variable) // max(1, variable.shape[0])
            tables.append(Table(variable.path, int(variable.shape[0]), row_bytes, float(rows)))
    return Sparse(tuple(tables))


def squared_norms(model: Any) -> Callable[[Sequence[Any]], tuple[float, float]]:
    """Returns a function of the parts of a batch that returns the mean of their squared norms, and the batch's."""

    @tf.function(reduce_retracing=True)
    def of_part(part: Any) -> list[Any]:
        return [_dense(gradient) for gradient in of(model, part) if gradient is not None]

    def of_parts(parts: Sequence[Any]) -> tuple[float, float]:
        total: list[Any] = []
        small = 0.0
        for part in parts:
            gradients = of_part(part)
            small += _squared_norm(gradients) / len(parts)
            total = [each + other for each, other in zip(total, gradients, strict=True)] if total else gradients
        return small, _squared_norm(total) / len(parts) ** 2

    return of_parts


def _dense(gradient: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _squared_norm(gradients: Sequence[Any]) -> float:
    return float(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients]))


def bytes_of(variable: Any) -> int:
    """Bytes of a variable of Keras."""
    return int(tf.as_dtype(variable.dtype).size * tf.TensorShape(variable.shape).num_elements())


def fit_in_memory(model: Any) -> bool:
    """True if dense copies of all gradients are small enough for the measurement of their norms."""
    return sum(map(bytes_of, model.trainable_variables)) <= _MOST_DENSE_BYTES
