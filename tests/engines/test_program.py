# SPDX-License-Identifier: Apache-2.0
"""A step is traced once, takes its batch from where it is told to, and gives back what its function returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_cluster import FakeCluster

from tfdist.engines.worker_function import Program
from tfdist.passes.worker_batch import WorkerBatch, kind_of

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    """One device: a program needs a scope and a device of a worker, not a cluster."""
    return tf.distribute.OneDeviceStrategy("/cpu:0")


def round_trip(strategy: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    program = Program(strategy, fn, args, kwargs, worker_fed=False)
    return program.rebuild(program.fetch(program.run(*program.flatten_arguments(args, kwargs))))


def handle_of(spec: Any) -> WorkerBatch:
    return WorkerBatch(kind_of(FakeCluster(1), spec))


RESULTS: dict[str, Callable[[tf.Tensor], Any]] = {
    "scalar": lambda x: x[0],
    "nothing": lambda x: None,
    "dict": lambda x: {"b": x[0], "a": x[1]},
    "nested": lambda x: {"logs": {"loss": x[0], "n": tf.constant(3)}, "rest": (x, [x[1], tf.constant(True)])},
    "several dtypes": lambda x: [
        tf.constant(i, dtype) for i, dtype in enumerate(["int32", "float64", "int64", "float32"])
    ],
    "constants of Python": lambda x: {"loss": x[0], "name": "mine", "number": 3},
    "vector": lambda x: x * 2.0,
    "text": lambda x: tf.constant("a text"),
    "empty": lambda x: tf.zeros([0, 3]),
}


@pytest.mark.parametrize("fn", RESULTS.values(), ids=RESULTS)
def test_a_result_comes_back_as_it_was(strategy: Any, fn: Callable[[tf.Tensor], Any]) -> None:
    x = tf.constant([1.5, 2.5])
    found, expected = round_trip(strategy, fn, x), fn(x)
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_scalars_of_one_dtype_travel_together(strategy: Any) -> None:
    program = Program(strategy, lambda: [tf.constant(float(i)) for i in range(9)] + [tf.zeros([2])], (), {}, False)
    assert len(program.run()) == 2


def test_composite_tensors_go_and_come_back(strategy: Any) -> None:
    ragged = tf.RaggedTensor.from_row_lengths([1, 2, 3], [2, 0, 1])
    assert round_trip(strategy, lambda t: t, ragged).to_list() == [[1, 2], [], [3]]
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    np.testing.assert_array_equal(tf.sparse.to_dense(round_trip(strategy, lambda t: t, sparse)), [[0, 1], [2, 0]])


def test_a_variable_in_the_result_comes_back_as_its_value(strategy: Any) -> None:
    variable = tf.Variable(4.0)
    assert float(round_trip(strategy, lambda: {"v": variable})["v"]) == 4.0


def test_arguments_by_name_and_constants_of_python_reach_the_function(strategy: Any) -> None:
    found = round_trip(strategy, lambda x, *, y, times: (x + y) * times, tf.constant(1.0), y=tf.constant(2.0), times=3)
    assert float(found) == 9.0


def test_it_is_traced_once_whatever_the_values(strategy: Any) -> None:
    traces = []
    program = Program(strategy, lambda x: traces.append(1) or x + 1.0, (tf.constant(0.0),), {}, False)
    assert [program.fetch(program.run(tf.constant(float(i))))[0] for i in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(traces) == 1


def test_the_step_runs_in_replica_context(strategy: Any) -> None:
    assert bool(round_trip(strategy, lambda: tf.constant(not tf.distribute.in_cross_replica_context())))


def test_the_replica_context_holds_inside_of_a_conditional(strategy: Any) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(x > 0.0, lambda: tf.constant(not tf.distribute.in_cross_replica_context()), lambda: False)

    assert bool(round_trip(strategy, step, tf.constant(1.0)))


def test_the_sum_over_one_replica_is_the_value_itself_and_no_operation(strategy: Any) -> None:
    """TensorFlow's own leaves operations, and a line in the log."""

    def step(x: tf.Tensor) -> Any:
        slices = tf.IndexedSlices(x, tf.constant([0, 2], tf.int64))
        operations = len(x.graph.get_operations())
        total, same = tf.distribute.get_replica_context().all_reduce("SUM", (x, slices))
        assert total is x
        assert same is slices
        assert len(x.graph.get_operations()) == operations
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, [total, 2.0])

    vector, two = round_trip(strategy, step, tf.constant([1.0, 2.0]))
    assert (list(vector.numpy()), float(two)) == ([1.0, 2.0], 2.0)


def test_it_may_be_made_while_another_function_is_traced(strategy: Any) -> None:
    made = []

    @tf.function(autograph=False)
    def outer() -> tf.Tensor:
        made.append(Program(strategy, lambda: tf.constant(5.0), (), {}, False))
        return tf.constant(0.0)

    outer()
    assert made[0].fetch(made[0].run())[0] == 5.0


def test_an_error_while_tracing_is_the_users_own(strategy: Any) -> None:
    def step() -> None:
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        Program(strategy, step, (), {}, False)


def test_pythons_control_flow_on_tensors_works_as_it_does_eagerly(strategy: Any) -> None:
    assert float(round_trip(strategy, _branching, tf.constant(-3.0))) == 3.0


def _branching(x: tf.Tensor) -> tf.Tensor:
    if x < 0.0:
        return -x
    return x


# The batch.

SPEC = (tf.TensorSpec([None, 2], tf.float32), {"y": tf.TensorSpec([None], tf.int64)})


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.arange(12.0, dtype="f").reshape(6, 2), {"y": np.arange(6)})).batch(4)


def sums(batch: Any, scale: Any = 1.0) -> Any:
    x, y = batch
    return tf.reduce_sum(x) * scale, tf.reduce_sum(y["y"])


def test_a_worker_takes_the_batch_from_its_iterator(strategy: Any) -> None:
    program = Program(strategy, sums, (handle_of(SPEC),), {}, worker_fed=True)
    iterator = iter(data())
    assert [[int(v) for v in program.fetch(program.run(iterator))] for _ in range(2)] == [[28, 6], [38, 9]]


def test_reading_beyond_the_end_of_the_data_is_an_error(strategy: Any) -> None:
    program = Program(strategy, sums, (handle_of(SPEC),), {}, worker_fed=True)
    iterator = iter(data())
    for _ in range(2):
        program.run(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        program.run(iterator)


def test_the_chief_sends_the_batch_first_and_the_other_tensors_after_it(strategy: Any) -> None:
    args = (handle_of(SPEC), tf.constant(10.0))
    program = Program(strategy, sums, args, {}, worker_fed=False)
    batch = tf.nest.flatten(next(iter(data())))
    found = program.fetch(program.run(*batch, *program.flatten_arguments(args, {})))
    assert [float(value) for value in found] == [280.0, 6.0]


# Without its result.


def test_run_for_its_effects_alone_it_has_the_same_effects(strategy: Any) -> None:
    total, reads = tf.Variable(0.0), tf.Variable(0)

    def step(x: tf.Tensor) -> Any:
        total.assign_add(x)
        return {"total": total.read_value(), "reads": reads.assign_add(1)}

    program = Program(strategy, step, (tf.constant(0.0),), {}, False)
    program.run_silently(tf.constant(1.0))
    program.prepare_silent()
    for value in (2.0, 3.0):
        program.run_silently(tf.constant(value))
    assert (float(total), int(reads)) == (6.0, 3)
    assert float(program.rebuild(program.fetch(program.run(tf.constant(4.0))))["total"]) == 10.0
