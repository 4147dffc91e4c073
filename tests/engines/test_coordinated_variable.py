# SPDX-License-Identifier: Apache-2.0
"""Additions become atomic operations exactly where they mean the same; the chief's accesses wait for the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import ps_values

from tfdist.tables.coordinated_variable import CoordinatedVariable
from tfdist.tables.partitioned_variable import coordinate

pytestmark = pytest.mark.devices

Step = Callable[[CoordinatedVariable], Any]


def variable(value: Any = 1.0, barriers: list[bool] | None = None) -> CoordinatedVariable:
    log = [] if barriers is None else barriers
    return CoordinatedVariable(tf.Variable(value, dtype=tf.float32), lambda writes: log.append(writes))


def operations(step: Step, on: CoordinatedVariable) -> set[str]:
    graph = tf.function(lambda: [step(on), None][1], autograph=False).get_concrete_function().graph
    return {operation.type for operation in graph.get_operations() if operation.type.startswith("Assign")}


def result(step: Step, on: CoordinatedVariable) -> Any:
    tf.function(lambda: [step(on), None][1], autograph=False)()
    return on.get().numpy()


ADDITIONS: dict[str, tuple[Step, float]] = {
    "self + x": (lambda v: v.assign(v + 2.0), 3.0),
    "x + self": (lambda v: v.assign(2.0 + v), 3.0),
    "read_value + x": (lambda v: v.assign(v.read_value() + 2.0), 3.0),
    "value + x": (lambda v: v.assign(v.value() + 2.0), 3.0),
    "converted + x": (lambda v: v.assign(tf.convert_to_tensor(v) + 2.0), 3.0),
    "tf.add": (lambda v: v.assign(tf.add(v, 2.0)), 3.0),
    "through identities": (lambda v: v.assign(tf.identity(tf.identity(v.read_value()) + 2.0)), 3.0),
    "self + self": (lambda v: v.assign(v + v), 2.0),
    "self + 2 self": (lambda v: v.assign(v + 2.0 * v), 3.0),
}
SUBTRACTIONS: dict[str, tuple[Step, float]] = {
    "self - x": (lambda v: v.assign(v - 2.0), -1.0),
    "self - self": (lambda v: v.assign(v - v), 0.0),
}
OTHERS: dict[str, tuple[Step, float]] = {
    "plain": (lambda v: v.assign(5.0), 5.0),
    "x - self": (lambda v: v.assign(3.0 - v), 2.0),
    "product": (lambda v: v.assign(v * 3.0), 3.0),
    "moving average": (lambda v: v.assign(v * 0.5 + 2.0), 2.5),
    "read before a write": (lambda v: _stale(v), 3.0),
    "read before a write in a function": (lambda v: _stale_in_a_function(v), 3.0),
    "two additions around a write": (lambda v: _stale_after_addition(v), 3.0),
}


def _stale(v: CoordinatedVariable) -> Any:
    before = v.read_value()
    v.assign(10.0)
    return v.assign(before + 2.0)


def _stale_in_a_function(v: CoordinatedVariable) -> Any:
    """Writes in functions that were traced before, and would not be traced again."""
    write = tf.function(lambda: [v.assign(10.0), None][1], autograph=False)
    write.get_concrete_function()
    before = v.read_value()
    write()
    return v.assign(before + 2.0)


def _stale_after_addition(v: CoordinatedVariable) -> Any:
    before = v.read_value()
    v.assign_add(10.0)
    return v.assign(before + 2.0)


@pytest.mark.parametrize(("step", "expected"), ADDITIONS.values(), ids=ADDITIONS)
def test_an_addition_to_itself_is_one_operation(step: Step, expected: float) -> None:
    assert operations(step, variable()) == {"AssignAddVariableOp"}
    assert result(step, variable()) == expected


@pytest.mark.parametrize(("step", "expected"), SUBTRACTIONS.values(), ids=SUBTRACTIONS)
def test_a_subtraction_from_itself_is_one_operation(step: Step, expected: float) -> None:
    assert operations(step, variable()) == {"AssignSubVariableOp"}
    assert result(step, variable()) == expected


@pytest.mark.parametrize(("step", "expected"), OTHERS.values(), ids=OTHERS)
def test_anything_else_stays_what_it_was(step: Step, expected: float) -> None:
    assert "AssignVariableOp" in operations(step, variable())
    assert result(step, variable()) == expected


def test_an_addition_to_another_variable_stays_an_assignment() -> None:
    other = variable(4.0)
    step = lambda v: v.assign(other + 2.0)  # noqa: E731
    assert operations(step, variable()) == {"AssignVariableOp"}
    assert result(step, variable()) == 6.0


def test_a_read_in_an_outer_function_is_not_taken_for_a_read_here() -> None:
    v = variable(1.0)

    @tf.function(autograph=False)
    def outer() -> None:
        before = v.read_value()

        @tf.function(autograph=False)
        def inner() -> None:
            v.assign(before + 2.0)

        v.assign(10.0)
        inner()

    outer()
    assert v.get().numpy() == 3.0


def test_a_sum_that_is_wider_than_the_variable_stays_an_error() -> None:
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        result(lambda v: v.assign(v + tf.ones([3])), variable())


def test_a_narrow_term_reaches_every_element() -> None:
    v = variable([1.0, 2.0, 3.0])
    assert list(result(lambda v: v.assign(v + 2.0), v)) == [3.0, 4.0, 5.0]


def test_the_assignment_returns_the_new_value() -> None:
    v = variable(1.0)
    assert float(tf.function(lambda: tf.convert_to_tensor(v.assign(v + 2.0)), autograph=False)()) == 3.0


@pytest.mark.parametrize("gather", ["sparse_read", "gather_nd"])
def test_an_addition_to_a_permutation_stays_an_assignment(gather: str) -> None:
    on = variable([1.0, 2.0, 4.0])
    indices = [[2], [0], [1]] if gather == "gather_nd" else [2, 0, 1]
    assert operations(lambda v: v.assign(getattr(v, gather)(indices) + 1.0), on) == {"AssignVariableOp"}
    assert result(lambda v: v.assign(getattr(v, gather)(indices) + 1.0), on).tolist() == [5.0, 2.0, 3.0]


def test_what_a_counter_is_counted_up_by_is_made_where_it_is(cpus: list[str]) -> None:
    with tf.device(cpus[1]):
        v = variable(1.0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        with tf.device(cpus[2]):
            v.assign(v + tf.cast(1, tf.float32))
            v.assign(v + x)

    graph = step.get_concrete_function(tf.TensorSpec([])).graph
    step(tf.constant(2.0))
    assert v.get().numpy() == 4.0
    added = [each.inputs[1] for each in graph.get_operations() if each.type == "AssignAddVariableOp"]
    assert [tensor.op.type for tensor in added] == ["Const", "Placeholder"]
    assert added[0].device == v.device


# Keras' own counters, which are `assign(self + x)`.


@pytest.fixture
def keras_variables() -> Any:
    """Whatever Keras makes here is a coordinated variable."""
    with tf.variable_creator_scope(lambda make, **kwargs: CoordinatedVariable(make(**kwargs), lambda writes: None)):
        yield


def race(step: Callable[[], Any]) -> None:
    """Runs a traced step 200 times from each of four threads at once."""
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        for _ in range(200):
            step()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_iterations_of_an_optimizer_lose_no_step(keras_variables: None) -> None:
    weight = keras.Variable(np.zeros(3, np.float32))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([weight])
    step = tf.function(lambda: optimizer.apply([tf.ones(3)], [weight]), autograph=False)
    step.get_concrete_function()
    race(step)
    assert int(optimizer.iterations.value.get()) == 800
    np.testing.assert_array_equal(weight.value.get(), np.full(3, -400.0))


def test_a_metric_loses_no_batch(keras_variables: None) -> None:
    metric = keras.metrics.Mean()
    step = tf.function(lambda: [metric.update_state(tf.constant([1.0, 3.0])), None][1], autograph=False)
    step.get_concrete_function()
    race(step)
    assert float(metric.count.value.get()) == 1600.0
    assert float(metric.total.value.get()) == 3200.0


# The chief.

READS: dict[str, Step] = {
    "numpy": lambda v: v.numpy(),
    "float": float,
    "read_value": lambda v: v.read_value(),
    "value": lambda v: v.value(),
    "arithmetic": lambda v: v + 1.0,
    "converted": tf.convert_to_tensor,
    "checkpointed": lambda v: v._serialize_to_tensors(),
}
WRITES: dict[str, Step] = {
    "assign": lambda v: v.assign(3.0),
    "assign_add": lambda v: v.assign_add(3.0),
    "assign_sub": lambda v: v.assign_sub(3.0),
    "restored": lambda v: v._restore_from_tensors({key: tf.constant(7.0) for key in v.get()._serialize_to_tensors()}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_on_the_chief_waits_for_the_workers(read: Step) -> None:
    barriers: list[bool] = []
    read(variable(barriers=barriers))
    assert barriers
    assert not any(barriers)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_on_the_chief_waits_for_the_workers_and_says_so(write: Step) -> None:
    barriers: list[bool] = []
    write(variable(barriers=barriers))
    assert barriers[0] is True


def test_reading_rows_on_the_chief_waits() -> None:
    barriers: list[bool] = []
    table = variable([[1.0], [2.0], [3.0]], barriers)
    assert table.sparse_read([2, 0]).numpy().tolist() == [[3.0], [1.0]]
    assert tf.gather(table, [1]).numpy().tolist() == [[2.0]]
    assert len(barriers) >= 2


@pytest.mark.parametrize("name", ["scatter_add", "scatter_sub", "scatter_update", "scatter_max", "scatter_min"])
def test_scattered_writes_reach_the_variable_and_wait(name: str) -> None:
    barriers: list[bool] = []
    plain, coordinated = tf.Variable([1.0, 2.0, 3.0]), variable([1.0, 2.0, 3.0], barriers)
    for target in (plain, coordinated):
        getattr(target, name)(tf.IndexedSlices(tf.constant([2.0, 9.0]), tf.constant([0, 2])))
    np.testing.assert_array_equal(coordinated.get(), plain)
    assert barriers[0] is True


def test_tracing_waits_for_nobody() -> None:
    barriers: list[bool] = []
    v = variable(barriers=barriers)
    tf.function(lambda: [v.assign(v + 1.0), v.read_value(), None][2], autograph=False)()
    assert barriers == []


def test_a_gradient_reaches_it() -> None:
    v = variable(3.0)

    @tf.function(autograph=False)
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, v)

    assert float(gradient()) == 6.0


def test_only_single_variables_on_parameter_servers_are_wrapped() -> None:
    plain = tf.Variable(1.0)
    assert coordinate(plain, lambda writes: None) is plain
    wrapped = coordinate(ps_values.CachingVariable(plain), lambda writes: None)
    assert isinstance(wrapped, CoordinatedVariable)
    assert wrapped.get() is plain
    assert coordinate(wrapped, lambda writes: None) is wrapped
