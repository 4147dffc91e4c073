# SPDX-License-Identifier: Apache-2.0
"""A step whose data don't come changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfdist.engines import whole_step

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"


def some(count: int) -> Any:
    return iter(tf.data.Dataset.range(count).map(lambda number: {"a": number, "b": tf.cast(number, tf.float32)}))


def test_what_needs_no_data_is_not_written_at_their_end():
    counted, counted_in_cond, added = tf.Variable(0), tf.Variable(0), tf.Variable(0.0)

    @tf.function
    def step(data: Any) -> tf.Tensor:
        with whole_step.or_none({DEVICE: data}):
            counted.assign_add(1)
            tf.cond(counted > 0, lambda: counted_in_cond.assign_add(1), lambda: counted_in_cond.assign_sub(1))
            return added.assign_add(data["b"])

    @tf.function
    def of(iterator: Any) -> tf.Tensor:
        return step(next(iterator))

    data = some(3)
    # What TensorFlow does by itself is a matter of luck, so the end is tried more than once.
    for _ in range(3):
        of(data)
    for _ in range(20):
        with pytest.raises(tf.errors.OutOfRangeError):
            of(data)
    assert counted.numpy() == counted_in_cond.numpy() == 3
    assert added.numpy() == 0.0 + 1.0 + 2.0


def test_only_what_writes_and_needs_no_data_is_ordered():
    counted, added = tf.Variable(0), tf.Variable(0.0)

    @tf.function
    def step(data: Any) -> tf.Tensor:
        with whole_step.or_none({DEVICE: data}):
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
    with whole_step.or_none({DEVICE: {"a": tf.constant(1), "b": None}}):
        assert tf.executing_eagerly()


def test_a_step_without_tensors_is_left_alone():
    counted = tf.Variable(0)

    @tf.function
    def step() -> tf.Tensor:
        with whole_step.or_none({DEVICE: (1, None)}):
            return counted.assign_add(1)

    assert int(step()) == 1
