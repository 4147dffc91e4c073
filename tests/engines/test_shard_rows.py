# SPDX-License-Identifier: Apache-2.0
"""A variable in shards is read, looked up, written and differentiated as one variable is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable

from tfdist.compat.keras import sharding
from tfdist.step.contribution import ReplicaContribution, add_up, times
from tfdist.tables import partitioned_variable
from tfdist.tables.partitioned_variable import RowPieces, coordinate

pytestmark = pytest.mark.devices

VALUE = np.arange(21.0).reshape(7, 3)
IDS = np.array([[0, 6, 6], [3, 4, 0]])


def made() -> tuple[Any, tf.Variable]:
    rows = (VALUE[:3], VALUE[3:5], VALUE[5:])
    shards = sharded_variable.ShardedVariable([tf.Variable(each) for each in rows], name="table")
    return coordinate(shards, lambda writes: None), tf.Variable(VALUE)


def in_a_function(step: Callable[[Any], Any], variable: Any) -> Any:
    return tf.function(lambda: step(variable), autograph=False)()


def with_gradient(loss_of: Callable[[Any], Any], variable: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(variable)
    return loss, tape.gradient(loss, variable.handle)


def gathered(variable: Any, ids: Any = IDS) -> tf.Tensor:
    return tf.reduce_sum(tf.gather(variable, ids) ** 2)


def read(variable: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.convert_to_tensor(variable) ** 2)


def cubes(variable: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.gather(variable, [1, 6]) ** 3)


def in_a_branch(variable: Any) -> tf.Tensor:
    branch = tf.cond(tf.size(IDS) > 0, lambda: tf.gather(variable, IDS), lambda: tf.zeros([2, 3, 3], tf.float64))
    return cubes(variable) + tf.reduce_sum(branch**2)


def in_a_loop(variable: Any) -> tf.Tensor:
    body = lambda i, total: (i + 1, total + tf.reduce_sum(tf.gather(variable, [i, 6]) ** 2))  # noqa: E731
    return tf.while_loop(lambda i, total: i < 3, body, [0, tf.constant(0.0, tf.float64)])[1]


def read_in_a_function(variable: Any) -> tf.Tensor:
    return gathered(variable) + 10 * in_a_function(lambda v: tf.reduce_sum(tf.convert_to_tensor(v)), variable)


LOSSES: dict[str, Callable[[Any], tf.Tensor]] = {
    "gathered": gathered,
    "gathered twice": lambda variable: gathered(variable) + cubes(variable),
    "gathered and read": lambda variable: gathered(variable) + read(variable),
    "read and gathered": lambda variable: read(variable) + gathered(variable),
    "gathered in a function": lambda variable: in_a_function(gathered, variable),
    "read in a function": read_in_a_function,
    "gathered in a branch": in_a_branch,
    "gathered in a loop": in_a_loop,
    "gathered by rows of a read": lambda variable: gathered(tf.convert_to_tensor(variable), tf.constant(IDS, tf.int32)),
}


def assert_like_one_variable(step: Callable[[Any], Any]) -> None:
    (found, gradient), (expected, dense) = (in_a_function(step, variable) for variable in made())
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), tf.convert_to_tensor(dense))


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_lookups_have_the_gradients_of_one_variable(loss_of: Callable[[Any], Any]) -> None:
    assert_like_one_variable(lambda variable: with_gradient(loss_of, variable))


def test_lookups_have_gradients_for_a_tape_that_watches_the_variable_alone() -> None:
    def watched(variable: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variable.handle)
            loss = gathered(variable)
        return loss, tape.gradient(loss, variable.handle)

    assert_like_one_variable(watched)


def kinds_needed(step: Callable[[], Any]) -> list[str]:
    """The types of operations that the result of a step depends on."""
    graph = tf.function(step, autograph=False).get_concrete_function().graph
    needed, left = {}, [tensor.op for tensor in graph.outputs]
    while left:
        operation = left.pop()
        if operation.name not in needed:
            needed[operation.name] = operation.type
            left += [tensor.op for tensor in operation.inputs]
    return list(needed.values())


def test_a_lookup_reads_no_whole_shard() -> None:
    table, _ = made()
    kinds = kinds_needed(lambda: with_gradient(gathered, table))
    assert kinds.count("ResourceGather") == 3
    assert "ReadVariableOp" not in kinds


def test_the_gradient_has_each_row_once() -> None:
    table, _ = made()
    gradient = in_a_function(lambda variable: with_gradient(gathered, variable)[1], table)
    assert sorted(gradient.indices.numpy()) == sorted(set(IDS.ravel()))


@pytest.mark.parametrize("wrong", [[7], [0, -1]])
def test_an_id_out_of_range_is_named_with_its_table(wrong: list[int]) -> None:
    table, _ = made()
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"table.* \[0, 7\),.* Received: {wrong[-1]}\]"):
        in_a_function(lambda variable: tf.gather(variable, wrong), table)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 7\)"):
        tf.gather(table, wrong)


def test_a_keras_variable_looks_up_its_rows() -> None:
    table, one = made()
    variable = keras.Variable(VALUE.astype("float32"))
    sharding.know_shards()
    assert not hasattr(variable, "sparse_read")
    variable._value = table
    take = tf.function(keras.ops.take, autograph=False)
    traced = take.get_concrete_function(variable, IDS - 7, axis=0)
    # A read that nothing depends on would be made all the same, and copy the table.
    assert "ReadVariableOp" not in [operation.type for operation in traced.graph.get_operations()]
    # Negative ones count from the end, as in Keras.
    np.testing.assert_allclose(take(variable, IDS - 7, axis=0), tf.gather(one, IDS))
    ragged = tf.ragged.constant([[0, 6], [], [4]])
    assert take(variable, ragged, axis=0).to_list() == tf.nn.embedding_lookup(one, ragged).to_list()
    sparse = tf.sparse.from_dense([[3, 0], [0, 5]])
    np.testing.assert_allclose(take(variable, sparse, axis=0), keras.ops.take(keras.Variable(one), sparse, axis=0))


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]], ids=["plain", "weighted"])
def test_sparse_lookups_combine_rows(weights: list[float] | None) -> None:
    table, one = made()
    indices = [[0, 0], [0, 1], [1, 0]]
    ids = tf.SparseTensor(indices, tf.constant([6, 6, 2], tf.int64), [2, 2])
    weigh = None if weights is None else tf.SparseTensor(indices, tf.constant(weights, tf.float64), [2, 2])

    def combined(variable: Any) -> tf.Tensor:
        return tf.nn.embedding_lookup_sparse(variable, ids, weigh, combiner="mean")

    np.testing.assert_allclose(in_a_function(combined, table), combined(one))


def test_ragged_lookups_keep_their_rows() -> None:
    table, one = made()
    ids = tf.ragged.constant([[0, 6], [], [4]])
    found = in_a_function(lambda variable: tf.nn.embedding_lookup(variable, ids), table)
    assert found.to_list() == tf.nn.embedding_lookup(one, ids).to_list()


def test_slices_are_split_by_shard_with_rows_of_the_shard() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([6, 0, 3], tf.int64), tf.constant([7, 1]))
    pieces = tf.function(lambda: partitioned_variable.split_rows(slices, [3, 2, 2]))()
    assert [(each.indices.numpy().tolist(), each.values.numpy().ravel().tolist()) for each in pieces] == [
        ([0], [2.0]),
        ([0], [3.0]),
        ([1], [1.0]),
    ]


def test_rows_of_contributions_reach_their_shards_apart() -> None:
    table, _ = made()
    variable = keras.Variable(VALUE)
    variable._value = table

    def updates() -> list[Any]:
        values, found = tf.reshape(tf.range(15.0), [5, 3]), []
        gradients = [
            tf.IndexedSlices(values[:3], tf.constant([6, 0, 6], tf.int64)),
            tf.IndexedSlices(values[3:], tf.constant([5, 0], tf.int64)),
        ]
        pieces, one = RowPieces(gradients[:1], [(None, variable)]), tf.constant(1.0)
        sent = [ReplicaContribution(pieces.split([each]), [], [], [], one, one) for each in gradients]
        [gradient] = pieces.joined(add_up(sent, pieces.devices).gradients)
        stock = lambda shard, function, args, kwargs, group: found.append(args[0])  # noqa: E731
        partitioned_variable.update_by_shards(stock, False, lambda: True)(
            table, print, (times(gradient, one + 1),), {}, False
        )
        return found

    dense = [tf.convert_to_tensor(each).numpy().tolist() for each in tf.function(updates, autograph=False)()]
    assert dense == [[[30, 34, 38], [0] * 3, [0] * 3], [[0] * 3] * 2, [[18, 20, 22], [12, 16, 20]]]
    # Two for each shard, where contributions are added up; with one more, all rows would go by one server.
    assert kinds_needed(updates).count("ConcatV2") == 6


# Reads and writes of the whole.


def twice_read(variable: Any) -> Any:
    with tf.GradientTape() as tape:
        before = tf.convert_to_tensor(variable)
        variable.assign(before + 1.0)
        loss = tf.reduce_sum(before**2) + 5.0 * tf.reduce_sum(tf.convert_to_tensor(variable) ** 3)
    with tf.GradientTape() as later:
        again = tf.reduce_sum(tf.convert_to_tensor(variable) ** 2)
    return loss, tape.gradient(loss, variable.handle), later.gradient(again, variable.handle)


def of_a_slice(variable: Any) -> Any:
    variable[1:4].assign(variable[0:3] + 0.5)
    variable[0].assign([7.0, 8.0, 9.0])
    return variable[2:, 1]


def of_rows(variable: Any) -> Any:
    for method, row in (("add", 1), ("sub", 3), ("update", 4)):
        rows = tf.IndexedSlices(tf.ones([1, 3], tf.float64), tf.constant([row]))
        getattr(variable, f"scatter_{method}")(rows)
    return tf.identity(variable)


def in_a_loop(variable: Any) -> Any:
    with tf.GradientTape() as tape:
        loop = lambda i, total: (i + 1, total * tf.reduce_mean(tf.convert_to_tensor(variable)) + 1.0)  # noqa: E731
        total = tf.while_loop(lambda i, total: i < 3, loop, [0, tf.constant(2.0, tf.float64)])[1]
    return total, tape.gradient(total, variable.handle)


def written_in_a_loop(variable: Any) -> Any:
    def body(i: tf.Tensor) -> list[tf.Tensor]:
        variable.assign(tf.convert_to_tensor(variable) * 1.5 + 1.0)
        return [i + 1]

    tf.while_loop(lambda i: i < 3, body, [0])
    return tf.identity(variable)


@pytest.mark.parametrize(
    "step", [in_a_loop, written_in_a_loop, twice_read, of_a_slice, of_rows], ids=lambda step: step.__name__
)
def test_shards_compute_what_one_variable_does(step: Callable[[Any], Any]) -> None:
    many, one = made()
    found, expected = (tf.function(functools.partial(step, v), autograph=False)() for v in (many, one))
    tf.nest.map_structure(np.testing.assert_allclose, found, expected)
    np.testing.assert_allclose(tf.convert_to_tensor(many), one)
