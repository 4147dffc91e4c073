# SPDX-License-Identifier: Apache-2.0
"""Loops as TensorFlow's guides write them, on one embedded cluster; run by `test_parameter_server.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import dataset, dense, layers

COUNT = 26
# Each example once.
TOTAL = sum(range(COUNT))


class OneDevice:
    """Leaves data sets as they are."""

    experimental_distribute_dataset = staticmethod(lambda data: data)


def numbers(strategy: Any, change: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda data: data) -> Any:
    return strategy.experimental_distribute_dataset(change(tf.data.Dataset.range(COUNT)).batch(4))


def pairs(strategy: Any) -> Any:
    return numbers(strategy, lambda data: data.map(lambda i: (i, {"twice": 2 * i})))


def total(strategy: Any, *parts: Any) -> tf.Tensor:
    """The sum of all parts of a batch, made where the batch is."""
    result = strategy.run(lambda *parts: tf.add_n([tf.reduce_sum(part) for part in parts]), args=parts)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, result, axis=None)


# A batch that the caller unpacks.


@pytest.mark.parametrize("in_graph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_unpacked_batches_count_each_example_once(strategy: Any, in_graph: bool) -> None:
    once = tf.function(lambda x, y: total(strategy, x, y["twice"])) if in_graph else None
    sums = [int(once(x, y) if once else total(strategy, x, y["twice"])) for x, y in pairs(strategy)]
    assert sum(sums) == 3 * TOTAL
    assert len(sums) == 7


def test_unpacked_batches_are_read_by_workers(strategy: Any) -> None:
    data = iter(pairs(strategy))
    for x, y in data:
        total(strategy, x, y["twice"])
    assert not data.decide(by_chief=True).by_chief


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


def test_a_data_set_as_an_argument_is_traced_once(strategy: Any) -> None:
    traced = []

    @tf.function
    def epoch(data: Any) -> Any:
        traced.append(data)
        found, count = tf.constant(0, tf.int64), 0
        for batch in data:
            found += total(strategy, batch)
            count += 1
        return found, count

    for data in (numbers(strategy), numbers(strategy)):
        for _ in range(2):
            assert [int(value) for value in epoch(data)] == [TOTAL, 7]
    assert len(traced) == 1


@pytest.mark.parametrize("change", [lambda i: {"once": i, "twice": 2 * i}, lambda i: 3 * i])
def test_a_signature_of_the_data_set_takes_its_batches(strategy: Any, change: Any) -> None:
    data = numbers(strategy, lambda data: data.map(change))

    @tf.function(input_signature=[data.element_spec])
    def once(batch: Any) -> Any:
        result = strategy.run(
            lambda batch: tf.add_n(tf.nest.map_structure(tf.reduce_sum, tf.nest.flatten(batch))), args=(batch,)
        )
        return strategy.reduce("SUM", result, axis=None)

    assert sum(int(once(batch)) for batch in data) == 3 * TOTAL
    assert [spec.dtype for spec in tf.nest.flatten(data.element_spec)] == [tf.int64] * len(tf.nest.flatten(change(1)))


@pytest.mark.parametrize(
    "change", [lambda i: (i, 2 * i), lambda i: {"once": i, "twice": (i, 2 * i)}, lambda i: (i, tf.ragged.stack([i]))]
)
def test_the_specs_of_a_data_set_are_a_plain_structure(strategy: Any, change: Any) -> None:
    spec, plain = (numbers(each, lambda data: data.map(change)).element_spec for each in (strategy, OneDevice))
    assert spec == plain
    for tree in (keras.tree, tf.nest):
        tree.assert_same_structure(spec, plain)
        assert tree.flatten(spec) == tree.flatten(plain)
        assert tree.map_structure(lambda each: each.dtype, spec) == tree.map_structure(lambda each: each.dtype, plain)


def test_an_iterator_as_an_argument_is_traced_once(strategy: Any) -> None:
    traced = []

    @tf.function
    def some(iterator: Any, steps: Any) -> Any:
        traced.append(iterator)
        found = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            found += total(strategy, next(iterator))
        return found

    for _ in range(2):
        iterator = iter(numbers(strategy))
        assert sum(int(some(iterator, tf.constant(steps))) for steps in (3, 4)) == TOTAL
        with pytest.raises(tf.errors.OutOfRangeError):
            some(iterator, tf.constant(1))
    assert len(traced) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_loop_in_the_graph_ends_with_the_data(strategy: Any, known: bool) -> None:
    @tf.function
    def until_the_end(iterator: Any) -> Any:
        found = tf.constant(0, tf.int64)
        for _ in tf.range(100):
            some = iterator.get_next_as_optional()
            if not some.has_value():
                break
            found += total(strategy, some.get_value())
        for batch in iterator:
            found += total(strategy, batch)
        return found

    change = (lambda data: data) if known else (lambda data: data.filter(lambda i: i >= 0))
    assert int(until_the_end(iter(numbers(strategy, change)))) == TOTAL


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
