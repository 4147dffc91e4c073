# SPDX-License-Identifier: Apache-2.0
"""A variable in shards is read, written and differentiated as one variable is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import sharded_variable

from tfdist.tables.partitioned_variable import partition

pytestmark = pytest.mark.devices

VALUE = np.arange(15.0).reshape(5, 3)


def made() -> tuple[Any, tf.Variable]:
    shards = sharded_variable.ShardedVariable([tf.Variable(VALUE[:3], name="v/part_0"), tf.Variable(VALUE[3:])])
    return partition(shards, lambda writes: None), tf.Variable(VALUE)


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
    variable.scatter_nd_add([[1]], tf.ones([1, 3], tf.float64))
    variable.scatter_nd_sub([[3]], tf.ones([1, 3], tf.float64))
    variable.scatter_nd_update([[4, 2]], [20.0])
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
