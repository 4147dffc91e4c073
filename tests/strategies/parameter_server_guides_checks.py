# SPDX-License-Identifier: Apache-2.0
"""Loops as TensorFlow's guides write them, on one embedded cluster; run by `test_parameter_server.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import dataset, dense, layers

from tfdist.passes.worker_pass import WorkerFeed

COUNT = 26
# Each example once.
TOTAL = sum(range(COUNT))


def numbers(strategy: Any, change: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda data: data) -> Any:
    return strategy.experimental_distribute_dataset(change(tf.data.Dataset.range(COUNT)).batch(4))


def pairs(strategy: Any) -> Any:
    return numbers(strategy, lambda data: data.map(lambda i: (i, {"twice": 2 * i})))


def total(strategy: Any, *parts: Any) -> tf.Tensor:
    """The sum of all parts of a batch, made where the batch is."""
    result = strategy.run(lambda *parts: tf.add_n([tf.reduce_sum(part) for part in parts]), args=parts)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, result, axis=None)


# A batch that the caller unpacks.


def test_unpacked_batches_count_each_example_once(strategy: Any) -> None:
    sums = [int(total(strategy, x, y["twice"])) for x, y in pairs(strategy)]
    assert sum(sums) == 3 * TOTAL
    assert len(sums) == 7


def test_unpacked_batches_are_read_by_workers(strategy: Any) -> None:
    data = iter(pairs(strategy))
    for x, y in data:
        total(strategy, x, y["twice"])
    assert isinstance(data.decide(by_chief=True), WorkerFeed)


# Its value on the chief.


def test_the_value_of_a_batch_is_read_where_it_is_looked_at(strategy: Any) -> None:
    seen = []
    for x, y in pairs(strategy):
        np.testing.assert_array_equal(2 * x.numpy(), y["twice"])
        assert int(tf.reduce_max(x)) == int(strategy.experimental_local_results(x)[0][-1])
        seen += strategy.gather(x, axis=0).numpy().tolist()
        assert int(total(strategy, x, y["twice"])) == 3 * sum(x.numpy())
    assert seen == list(range(COUNT))


def test_results_are_told_apart_by_examples(strategy: Any) -> None:
    results = {}
    for index, x in numbers(strategy, lambda data: data.enumerate()):
        where, doubled = strategy.run(lambda index, x: (index, 2 * x), args=(index, x))
        for some, values in zip(
            strategy.experimental_local_results(where), strategy.experimental_local_results(doubled), strict=True
        ):
            results.update(zip(some.numpy().tolist(), values.numpy().tolist(), strict=True))
    assert results == {i: 2 * i for i in range(COUNT)}


# Loops in the graph.


def _epoch(strategy: Any, data: Any) -> Any:
    for batch in data:
        total(strategy, batch)


IN_GRAPHS: dict[str, Callable[[Any], Any]] = {
    "data set as an argument": lambda strategy: tf.function(_epoch)(strategy, numbers(strategy)),
    "data set": lambda strategy: tf.function(functools.partial(_epoch, strategy, numbers(strategy)))(),
    "iterator": lambda strategy: tf.function(lambda given: given.get_next_as_optional())(iter(numbers(strategy))),
    "batch": lambda strategy: tf.function(lambda given: total(strategy, given))(next(iter(pairs(strategy)))),
    "value of a batch": lambda strategy: tf.function(functools.partial(tf.add, 1, next(iter(numbers(strategy)))))(),
    "no batch": lambda strategy: tf.function(lambda: strategy.run(lambda: tf.constant(1)))(),
}


@pytest.mark.parametrize("loop", IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_a_loop_in_a_graph_is_refused_with_the_form_that_works(strategy: Any, loop: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"for batch in strategy.experimental_distribute_dataset.* Received: "):
        loop(strategy)


def test_values_from_a_function(strategy: Any) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10 + context.replica_id_in_sync_group + context.num_replicas_in_sync)
    )
    assert int(strategy.run(lambda x: 2 * x, args=(values,))) == 22


# Optimizers.


@pytest.mark.parametrize("in_graph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_optimizer_applied_first_outside_of_the_scope_keeps_its_slots_on_servers(
    strategy: Any, in_graph: bool
) -> None:
    model, alone = dense(strategy, "sgd"), layers()
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.01)
    alone.set_weights(model.get_weights())
    _train(model, optimizer, in_graph)
    _train(alone, keras.optimizers.Adam(0.01), in_graph)
    assert all("ps" in variable.value.device for variable in optimizer.variables)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _train(model: keras.Model, optimizer: Any, in_graph: bool) -> None:
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    once = tf.function(step) if in_graph else step
    for x, y in dataset():
        once(x, y)
