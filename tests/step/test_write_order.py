# SPDX-License-Identifier: Apache-2.0
"""A step whose data don't come changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist.step import replicas

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def some(count: int) -> Any:
    return iter(tf.data.Dataset.range(count).map(lambda number: {"a": number, "b": tf.cast(number, tf.float32)}))


def in_function(count: Callable[[], Any], data: Any) -> tf.Tensor:
    @tf.function
    def inner(number: tf.Tensor) -> tf.Tensor:
        count()
        return number * 2.0

    return inner(data["b"])


def in_cond(count: Callable[[], Any], data: Any) -> tf.Tensor:
    def branch() -> tf.Tensor:
        count()
        return data["b"] * 2.0

    return tf.cond(tf.random.uniform(()) < 2.0, branch, lambda: data["b"])


def in_while(count: Callable[[], Any], data: Any) -> tf.Tensor:
    def body(turn: tf.Tensor, number: tf.Tensor) -> Any:
        count()
        return turn + 1, number * 2.0

    return tf.while_loop(lambda turn, _: turn < 1, body, (tf.constant(0), data["b"]))[1]


def plain(count: Callable[[], Any], data: Any) -> tf.Tensor:
    count()
    return data["b"] * 2.0


@pytest.mark.parametrize("how", [plain, in_function, in_cond, in_while])
def test_what_needs_no_data_is_not_written_at_their_end(how: Callable[..., tf.Tensor]):
    counted, added = tf.Variable(0), tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(data: Any) -> tf.Tensor:
        with replicas.writes_after_inputs({DEVICE: data}):
            return added.assign_add(how(lambda: counted.assign_add(1), data))

    @tf.function(autograph=False)
    def of(iterator: Any) -> tf.Tensor:
        return step(next(iterator))

    data = some(3)
    for _ in range(3):
        of(data)
    # What TensorFlow does by itself is a matter of luck, so the end is tried more than once.
    for _ in range(20):
        with pytest.raises(tf.errors.OutOfRangeError):
            of(data)
    assert counted.numpy() == 3
    assert added.numpy() == 2.0 * (0.0 + 1.0 + 2.0)


def test_only_what_writes_and_needs_no_data_is_ordered():
    counted, added = tf.Variable(0), tf.Variable(0.0)

    @tf.function
    def step(data: Any) -> tf.Tensor:
        with replicas.writes_after_inputs({DEVICE: data}):
            counted.assign_add(1)
            return added.assign_add(data + 1.0) + tf.cast(counted, tf.float32)

    operations = step.get_concrete_function(tf.TensorSpec((), tf.float32)).graph.get_operations()
    writes = [operation for operation in operations if operation.type == "AssignAddVariableOp"]
    assert [[one.type for one in operation.control_inputs] for operation in writes] == [["NoOp"], []]
    (ready,) = writes[0].control_inputs
    assert [one.type for one in ready.control_inputs] == ["Placeholder"]
    assert [operation for operation in operations if ready in operation.control_inputs] == writes[:1]
    assert float(step(tf.constant(1.0))) == 2.0 + 1.0


def test_outside_of_a_graph_it_does_nothing():
    with replicas.writes_after_inputs({DEVICE: {"a": tf.constant(1), "b": None}}):
        assert tf.executing_eagerly()


def test_what_the_graph_did_not_make_has_come():
    counted, data = tf.Variable(0), tf.constant(1)

    @tf.function
    def step() -> tf.Tensor:
        with replicas.writes_after_inputs({DEVICE: (data, counted)}):
            return counted.assign_add(data)

    assert int(step()) == 1


def test_a_step_without_tensors_is_left_alone():
    counted = tf.Variable(0)

    @tf.function
    def step() -> tf.Tensor:
        with replicas.writes_after_inputs({DEVICE: (1, None)}):
            return counted.assign_add(1)

    assert int(step()) == 1
