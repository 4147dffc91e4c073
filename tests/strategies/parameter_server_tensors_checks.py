# SPDX-License-Identifier: Apache-2.0
"""Tensors that models send between workers and parameter servers. Run by `test_parameter_server.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import (
    COUNT,
    X,
    Y,
)
from training import build_metrics

from tfdist.engines.transfer import plan
from tfdist.engines.worker_function import Program


def _deep(strategy: Any, num_layers: int) -> keras.Model:
    with strategy.scope():
        hidden = [keras.layers.Dense(5) for _ in range(num_layers - 1)]
        model = keras.Sequential([keras.Input((X.shape[1],)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    # Makes the variables of the metrics.
    build_metrics(model, X[:1], Y[:1])
    return model


def _travelling(graph: Any) -> set[str]:
    """The tensors of a traced step that one machine makes and another one takes, as far as devices are given."""
    return set(_travelling_shapes(graph))


def _travelling_shapes(graph: Any) -> dict[str, tf.TensorShape]:
    return {
        tensor.name: tensor.shape
        for operation in graph.get_operations()
        for tensor in operation.inputs
        if tensor.dtype != tf.resource and _is_on_server(tensor.op) != _is_on_server(operation)
    }


def _is_on_server(operation: tf.Operation) -> bool:
    # A variable is read where it is, without a device of its own.
    return operation.device.startswith("/job:ps") or operation.type == "ReadVariableOp"


@pytest.mark.slow
def test_as_many_tensors_travel_however_many_small_layers_there_are(strategy: Any) -> None:
    models = [_deep(strategy, num_layers) for num_layers in (3, 5)]
    for kind in ("train", "test"):
        steps = [getattr(model, f"{kind}_step") for model in models]
        programs = [
            Program(strategy, step, ((tf.constant(X), tf.constant(Y)),), {}, False, transfer=plan.TransferPlan("auto"))
            for step in steps
        ]
        few, many = (_travelling(program.graph) for program in programs)
        assert few
        assert len(few) == len(many)


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


# An update by the gradient alone, by its norm as well, and by its scale. Momentum and averages come after that.
WIDE_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    # With Adam's own epsilon, and with larger rates, the last bit of a product grows to more than what is allowed here.
    "Adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.01),
    "clipping and decay": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.5, weight_decay=0.01),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.001), initial_scale=8.0),
}


# A scale of losses is a factor of what is multiplied; "Adam" has the products.
_SCALED = dict.fromkeys(("loss scaling", "clipping and decay"), pytest.mark.slow)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(make, id=name, marks=_SCALED.get(name, ())) for name, make in WIDE_OPTIMIZERS.items()]
)
def test_a_wide_layer_learns_as_on_one_device(strategy: Any, optimizer: Callable[[], Any]) -> None:
    """One batch per epoch, of a size that is not known while tracing: on both sides of each limit, and all."""
    with strategy.scope():
        model = _wide(optimizer())
    with tf.distribute.get_strategy().scope():
        alone = _wide(optimizer())
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
        shapes = _travelling_shapes(program.graph).values()
        assert all(shape.num_elements() < 5000 for shape in shapes) == is_gathered
    for each in (model, alone):
        each.fit(ids, Y, batch_size=COUNT, epochs=3, shuffle=False, verbose=0)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
