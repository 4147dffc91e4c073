# SPDX-License-Identifier: Apache-2.0
"""Values of variables that were read ahead stand for them in a step, until the step writes the variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist.tables.coordinated_variable import CoordinatedVariable

pytestmark = pytest.mark.devices


def ahead(step: Callable[..., Any]) -> tuple[list[Any], CoordinatedVariable]:
    """Returns the result of a step that is traced with 7 read ahead, and its variable, which is 1."""
    on = CoordinatedVariable(tf.Variable(1.0), lambda writes: None)

    @tf.function(autograph=False)
    def traced() -> Any:
        on.ahead = tf.constant(7.0)
        try:
            return step(on)
        finally:
            on.ahead = None

    return tf.nest.map_structure(lambda tensor: tensor.numpy(), traced()), on


def _written(v: CoordinatedVariable) -> list[tf.Tensor]:
    before = v.read_value()
    v.assign(before * 2.0)
    return [before, v.read_value()]


def _gradients(v: CoordinatedVariable) -> list[tf.Tensor]:
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = v.read_value() ** 2 * v
        gradient = tape.gradient(loss, v)
    return [gradient, outer.gradient(gradient, v)]


def _written_in_a_function(v: CoordinatedVariable) -> list[tf.Tensor]:
    write = tf.function(lambda: [v.assign(10.0), None][1], autograph=False)
    write.get_concrete_function()
    before = v.read_value()
    write()
    return [before, v.read_value()]


def _written_beneath(v: CoordinatedVariable) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        before = v * 1.0
    for watched in tape.watched_variables():
        watched.assign_sub(3.0)
    return [before, v.read_value()]


def _forward(v: CoordinatedVariable) -> list[tf.Tensor]:
    with tf.autodiff.ForwardAccumulator(v.get(), tf.constant(2.0)) as accumulator:
        loss = v.read_value() ** 2
    return [accumulator.jvp(loss)]


READ_AHEAD: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "every way of reading": (lambda v: [v.read_value(), v.value(), tf.convert_to_tensor(v), v + 0.0], [7.0] * 4),
    "after a write": (_written, [7.0, 14.0]),
    "after a write in a function": (_written_in_a_function, [7.0, 10.0]),
    "after a write to what a tape watches": (_written_beneath, [7.0, -2.0]),
    "2 (2 v)": (_forward, [28.0]),
    "in a conditional": (lambda v: [tf.cond(tf.random.uniform([]) < 2, v.read_value, lambda: 0.0)], [1.0]),
    "an addition": (lambda v: [v.assign(v + 2.0), v.read_value()][1:], [3.0]),
    "3 v ** 2 and 6 v": (_gradients, [147.0, 42.0]),
}


@pytest.mark.parametrize(("step", "expected"), READ_AHEAD.values(), ids=READ_AHEAD)
def test_what_was_read_ahead_stands_for_the_variable_until_it_is_written(
    step: Callable[..., Any], expected: list[float]
) -> None:
    assert ahead(step)[0] == expected


def test_nothing_is_left_of_what_was_read_ahead() -> None:
    _, on = ahead(lambda v: [v.read_value()])
    assert tf.function(on.read_value, autograph=False)().numpy() == 1.0


def test_rows_are_not_read_ahead() -> None:
    on = CoordinatedVariable(tf.Variable([1.0, 2.0]), lambda writes: None)

    @tf.function(autograph=False)
    def traced() -> Any:
        on.ahead = tf.constant([8.0, 9.0])
        return on.sparse_read([1]), on.gather_nd([[1]])

    assert [tensor.numpy().tolist() for tensor in traced()] == [[2.0], [2.0]]
