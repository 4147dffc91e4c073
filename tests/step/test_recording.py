# SPDX-License-Identifier: Apache-2.0
"""Writes of a step, before and after `optimizer.apply`, have the effect that they have in the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from halves import Halves, X, Y, batches, made
from own_models import Combined
from training import assert_close

from tfdist.step import recording
from tfdist.tables.coordinated_variable import CoordinatedVariable

pytestmark = pytest.mark.devices


class Stepping(keras.Model):
    """A model whose steps do something else besides, before or after they update."""

    def __init__(self, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.table = self.add_weight(shape=(4, 2), initializer="ones", trainable=False, name="table")
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="number")
        self.before, self.after = before, after

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def loss_of(self, x: Any, y: Any) -> Any:
        return tf.reduce_mean((self(x) - y) ** 2)

    def gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data: Any) -> Any:
        self.before(self)
        loss, gradients = self.gradients(*data)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.after(self)
        return {"loss": loss}


def nothing(model: Any) -> None:
    del model


def halve(model: Any) -> tf.Tensor:
    model.table.assign(tf.convert_to_tensor(model.table) * 0.5 + 1.0)
    return tf.constant(0)


def conditionally(model: Any) -> None:
    model.number.assign_add(1)
    tf.cond(tf.equal(model.number % 2, 0), lambda: halve(model), lambda: tf.constant(0))


def in_a_loop(model: Any) -> None:
    tf.while_loop(lambda i: i < 3, lambda i: (halve(model) + i + 1,), [0])


def by_a_kernel(model: Any) -> None:
    model.dense.kernel.assign(tf.convert_to_tensor(model.dense.kernel) * 0.5)


def of_the_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.1 / (1.0 + tf.cast(model.optimizer.iterations, tf.float32))


def trained(make: Callable[[], keras.Model]) -> None:
    """Compares the two halves with the plain step."""
    plain, halved = (made(make, metrics=None) for _ in range(2))
    step, halves = tf.function(plain.train_step, autograph=False), Halves(halved)
    for x, y in batches()[:3]:
        assert_close(step((tf.constant(x), tf.constant(y))), halves(x, y))
    assert_close(plain.get_weights(), halved.get_weights())
    assert int(plain.optimizer.iterations.numpy()) == int(halved.optimizer.iterations.numpy())


@pytest.mark.parametrize("before", [conditionally, in_a_loop, pytest.param(by_a_kernel, marks=pytest.mark.slow)])
def test_writes_before_the_update_are_those_of_the_plain_step(before: Callable[[Any], Any]) -> None:
    trained(lambda: Stepping(before, nothing))


def of_the_count(model: Any) -> None:
    model.number.assign(tf.cast(model.optimizer.iterations, tf.int32))


def test_updates_are_counted_where_the_step_reads_it_after_the_update() -> None:
    trained(lambda: Stepping(nothing, of_the_count))
    trained(lambda: Stepping(nothing, of_the_rate))


def test_weights_written_after_the_update_are_refused() -> None:
    model = made(lambda: Stepping(nothing, by_a_kernel), metrics=None)
    with pytest.raises(
        ValueError, match=r"must not write weights after optimizer\.apply.*Received: a write of '.*kernel'"
    ):
        Halves(model)


def of_a_weight(model: Any) -> None:
    model.table.assign(model.table + tf.reduce_sum(model.dense.kernel))


class Persistent(Stepping):
    """Asks for two gradients of one tape, the second of them after an update, which reads no weight."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "steepness": tf.norm(tape.gradient(loss, self.trainable_variables)[0])}


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: Stepping(nothing, of_a_weight), 1),
        pytest.param(lambda: Stepping(of_a_weight, of_the_count), 0, marks=pytest.mark.slow),
        pytest.param(lambda: Persistent(nothing, nothing), 0, marks=pytest.mark.slow),
    ],
    ids=["read after", "read before", "gradient after"],
)
def test_weights_read_after_the_update_are_told_in_one_line(capsys, make: Any, lines: int) -> None:
    model = made(make, metrics=None)
    Halves(model)
    told = [line for line in capsys.readouterr().err.splitlines() if "after optimizer.apply" in line]
    assert [line.partition("Received: ")[2] for line in told] == [f"a read of {model.dense.kernel.path!r}"] * lines


@pytest.mark.parametrize("is_late", [True, False])
def test_copy_of_what_was_read_ahead_is_a_read_of_the_weight(is_late: bool) -> None:
    variable = CoordinatedVariable(tf.Variable(1.0), lambda writes: None)
    variable.path = "dense/kernel"
    found: list[str] = []

    @tf.function(autograph=False)
    def traced() -> None:
        graph: Any = tf.compat.v1.get_default_graph()
        variable.ahead = tf.constant(7.0)
        if not is_late:
            variable.read_value()
        count = len(graph.get_operations())
        if is_late:
            variable.read_value()
        found.extend(each.path for each in recording.read_since(count, [variable]))
        variable.ahead = None

    traced.get_concrete_function()
    assert found == ["dense/kernel"] * is_late


class Sharp(Stepping):
    """Takes its gradient where the weights are moved to (SAM), on all examples alike."""

    def train_step(self, data: Any) -> Any:
        weights = self.trainable_variables
        for weight in weights:
            weight.assign_add(0.125 * tf.ones_like(tf.convert_to_tensor(weight)))
        loss, gradients = self.gradients(*data)
        for weight in weights:
            weight.assign_sub(0.125 * tf.ones_like(tf.convert_to_tensor(weight)))
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@pytest.mark.slow
def test_gradients_of_weights_that_are_moved_are_those_of_the_plain_step() -> None:
    trained(lambda: Sharp(nothing, nothing))


class Recurrent(Stepping):
    """Reads its weights in a loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dense = keras.layers.LSTM(1)

    def call(self, x: Any) -> Any:
        return self.dense(x[..., None])


def by_all_weights(model: Any) -> None:
    for weight in model.trainable_variables:
        weight.assign(0.5 * tf.convert_to_tensor(weight))


@pytest.mark.slow
def test_weights_written_before_a_loop_have_gradients() -> None:
    trained(lambda: Recurrent(by_all_weights, nothing))


def in_a_conditional(update: Callable[[], Any]) -> None:
    tf.cond(tf.random.uniform([]) < 1.0, lambda: [update(), 0][1], lambda: 0)


def in_a_while_loop(update: Callable[[], Any]) -> None:
    tf.while_loop(lambda i: i < 2, lambda i: [update(), i + 1][1:], [0])


def in_a_function(update: Callable[[], Any]) -> None:
    tf.function(lambda: [update(), 0][1])()


@pytest.mark.parametrize("where", [in_a_conditional, in_a_while_loop, in_a_function])
def test_an_update_below_the_top_of_the_step_is_refused(where: Callable[[Callable[[], Any]], None]) -> None:
    class Below(Stepping):
        def train_step(self, data: Any) -> Any:
            loss, gradients = self.gradients(*data)
            where(lambda: self.optimizer.apply(gradients, self.trainable_variables))
            return {"loss": loss}

    model = made(lambda: Below(nothing, nothing), metrics=None)
    with pytest.raises(ValueError, match=r"optimizer\.apply inside of a conditional"):
        Halves(model)(X[:9], Y[:9])


COMBINATIONS = {
    "maximum": lambda value, y: tf.maximum(value, tf.reduce_max(y)),
    "minimum": lambda value, y: tf.minimum(value + 0.0, -tf.reduce_max(y)),
    "difference": lambda value, y: value - tf.reduce_sum(y),
}


@pytest.mark.parametrize("combine", COMBINATIONS.values(), ids=COMBINATIONS)
def test_metrics_that_are_no_sums_are_those_of_the_plain_step(combine: Callable[..., Any]) -> None:
    plain, halved = (made(metrics=[Combined(combine)]) for _ in range(2))
    halves = Halves(halved)
    for x, y in batches()[:3]:
        expected, found = plain.train_step((tf.constant(x), tf.constant(y))), halves(x, y)
        assert_close(expected["total"], found["total"])


UNKNOWN = {
    "decaying": lambda value, y: 0.9 * value + tf.reduce_mean(y),
    "of this batch": lambda value, y: tf.reduce_mean(y),
}


@pytest.mark.parametrize("combine", UNKNOWN.values(), ids=UNKNOWN)
def test_a_metric_that_cannot_be_added_up_is_refused(combine: Callable[..., Any]) -> None:
    model = made(metrics=[Combined(combine)])
    with pytest.raises(ValueError, match=r"update a metric's variable as assign\(variable \+ x\).*total"):
        Halves(model)


@pytest.mark.timeout(60)
def test_a_long_chain_of_additions_is_an_addition() -> None:
    with tf.Graph().as_default():
        start = tf.zeros([])
        value = start
        for _ in range(60):
            value += tf.random.uniform([])
        assert recording.kind(value, start) == recording.ADDITION
