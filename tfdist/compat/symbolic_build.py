# SPDX-License-Identifier: Apache-2.0
"""Builds a model, its loss and its metrics for ragged and sparse batches.

Keras does that under a distribution strategy with a stand-in for the batch that has its shape and dtype alone, so that
a model which takes a ragged or sparse tensor finds a dense one. There is no public way to give it another: once all is
built it leaves it alone.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.trainers.data_adapters import data_adapter_utils


def build(model: keras.Model, batch: Any) -> None:
    """Builds what is not built yet, if the batch has ragged or sparse parts."""
    if not any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in tf.nest.flatten(batch)):
        return
    x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(batch)
    # Keras' own tracing knows sparse tensors, but no ragged ones.
    call = tf.function(lambda x: model(x, training=False), autograph=False)
    with keras.StatelessScope():
        predicted = call.get_concrete_function(x).structured_outputs
    x, y, weight, predicted = (tf.nest.map_structure(_symbolic, each) for each in (x, y, weight, predicted))
    metrics, loss = model._compile_metrics, model._compile_loss
    if metrics is not None and not metrics.built:
        backend.compute_output_spec(model.compute_metrics, x, y, predicted, sample_weight=weight)
    if loss is not None and not loss.built:
        backend.compute_output_spec(model._compute_loss, x, y, predicted, sample_weight=weight, training=False)


def _symbolic(leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    dtype = backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(leaf.shape, dtype, sparse=isinstance(leaf, tf.SparseTensor))
