# SPDX-License-Identifier: Apache-2.0
"""Tensors that models send between workers and parameter servers. Run by `test_parameter_server.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import COUNT, Y

from tfdist.engines.transfer import plan
from tfdist.engines.worker_function import Program


def _travelling_shapes(graph: Any) -> list[tf.TensorShape]:
    """Of the tensors of a traced step that one machine makes and another one takes, as far as devices are given."""
    return [
        tensor.shape
        for operation in graph.get_operations()
        for tensor in operation.inputs
        if tensor.dtype != tf.resource and _is_on_server(tensor.op) != _is_on_server(operation)
    ]


def _is_on_server(operation: tf.Operation) -> bool:
    # A variable is read where it is, without a device of its own.
    return operation.device.startswith("/job:ps") or operation.type == "ReadVariableOp"


# What a wide layer sends.

WIDE = np.random.default_rng(1).normal(size=(COUNT, 300)).astype(np.float32)


def _wide(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(400, activation="relu"), keras.layers.Dense(350, activation="relu")]
    model = keras.Sequential([keras.Input((300,)), *hidden, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def _wide_data(rows: int, drop_remainder: bool = False) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((WIDE, Y)).batch(rows, drop_remainder=drop_remainder)


@pytest.mark.parametrize(("rows", "is_there"), [(64, True), (65, False)])
def test_the_gradient_of_a_wide_layer_is_multiplied_where_its_kernel_is(
    strategy: Any, rows: int, is_there: bool
) -> None:
    with strategy.scope():
        model = _wide(keras.optimizers.SGD(0.01))
    model.optimizer.build(model.trainable_variables)
    batch = next(iter(strategy.experimental_distribute_dataset(_wide_data(rows, drop_remainder=True))))
    graph = Program(strategy, model.train_step, (batch,), {}, worker_fed=True, transfer=plan.TransferPlan("auto")).graph
    products = [
        operation
        for operation in graph.get_operations()
        if operation.type == "MatMul" and operation.outputs[0].shape == (300, 400) and operation.outputs[0].consumers()
    ]
    assert [_is_on_server(operation) for operation in products] == [is_there]


def test_a_wide_layer_learns_as_on_one_device(strategy: Any) -> None:
    """One batch per epoch, of a size that is not known while tracing: on both sides of each limit, and all."""
    # With Adam's own epsilon, and with larger rates, the last bit of a product grows to more than what is allowed here.
    with strategy.scope():
        model = _wide(keras.optimizers.Adam(0.01, epsilon=0.01))
    with tf.distribute.get_strategy().scope():
        alone = _wide(keras.optimizers.Adam(0.01, epsilon=0.01))
    for rows in (10, 32, 33, 64, 65, COUNT):
        for each in (model, alone):
            each.fit(_wide_data(rows).take(1), verbose=0)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _with_table(num_rows: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((), dtype="int64"), keras.layers.Embedding(num_rows, 8), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def test_rows_of_a_table_are_gathered_where_it_is(strategy: Any) -> None:
    ids = np.arange(COUNT) % 50
    with strategy.scope():
        model = _with_table(5000)
    with tf.distribute.get_strategy().scope():
        alone = _with_table(5000)
    for transfer, is_gathered in ((plan.TransferPlan("auto"), True), (plan.TransferPlan("plain"), False)):
        data = tf.constant(ids), tf.constant(Y)
        program = Program(strategy, model.train_step, (data,), {}, worker_fed=False, transfer=transfer)
        shapes = _travelling_shapes(program.graph)
        assert all(shape.num_elements() < 5000 for shape in shapes) == is_gathered
    for each in (model, alone):
        each.fit(ids, Y, batch_size=COUNT, epochs=3, shuffle=False, verbose=0)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
