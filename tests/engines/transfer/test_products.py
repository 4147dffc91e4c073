# SPDX-License-Identifier: Apache-2.0
"""A product that is made where its kernel is gives what it gave, and the kernel stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.engines.transfer import rewrites

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("cpus")]

HERE, THERE = (f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(2))
INPUTS, OUTPUTS = 300, 400
# Of one product and of two: forward alone, and with the gradient of the inputs.
MOST_ROWS = {1: 64, 2: 32}


def placed(graph: Any, result: Any, batch_rows: tf.Tensor | None) -> Any:
    return rewrites.at_the_kernel(graph, result, lambda inputs, outputs: MOST_ROWS[1], batch_rows, lambda device: True)


class Traced:
    """A function of a batch, traced for `here`, with a kernel that is `there`."""

    def __init__(self, step: Callable[[Any, Any], Any], rows: int | None = None) -> None:
        random = np.random.default_rng(0)
        with tf.device(THERE):
            self.kernel = tf.Variable(random.normal(size=(INPUTS, OUTPUTS)).astype(np.float32))

        def function(x: tf.Tensor) -> Any:
            with tf.device(HERE):
                batch_rows = tf.shape(x, out_type=tf.int64)[0]
                result = step(x, self.kernel)
            return placed(tf.compat.v1.get_default_graph(), result, batch_rows)

        def plain(x: tf.Tensor) -> Any:
            with tf.device(HERE):
                return step(x, self.kernel)

        signature = [tf.TensorSpec([rows, INPUTS])]
        self.function = tf.function(function, signature, autograph=False).get_concrete_function()
        self.plain = tf.function(plain, signature, autograph=False).get_concrete_function()
        self._at_first = self.kernel.numpy()

    def assert_same(self, rows: int) -> None:
        x = tf.constant(np.random.default_rng(rows).normal(size=(rows, INPUTS)).astype(np.float32))
        expected = self.plain(x)
        self.kernel.assign(self._at_first)
        found = self.function(x)
        self.kernel.assign(self._at_first)
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected, expand_composites=True)

    def kernels_sent(self) -> list[str]:
        """Returns tensors as large as the kernel that go from its device to this one or back, by type of operation."""
        operations = self.function.graph.get_operations()
        # Nobody makes a copy that nobody takes.
        made = [each for each in operations if each.type != "Identity" or each.outputs[0].consumers()]
        pairs = {(tensor.op, operation) for operation in made for tensor in operation.inputs}
        return [
            source.type
            for source, user in pairs
            if source.outputs[0].shape.num_elements() == INPUTS * OUTPUTS and self._where(source) != self._where(user)
        ]

    def _where(self, operation: tf.Operation) -> str:
        return THERE if operation.type == "ReadVariableOp" else operation.device or HERE


def forward(x: tf.Tensor, kernel: tf.Variable) -> tf.Tensor:
    return tf.tanh(tf.matmul(x, kernel))


def backward(x: tf.Tensor, kernel: tf.Variable) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.tanh(tf.matmul(x, kernel)))
    return tape.gradient(loss, x)


@pytest.mark.parametrize(("step", "number"), [(forward, 1), (backward, 2)])
def test_few_rows_are_multiplied_where_the_kernel_is(step: Any, number: int) -> None:
    most = MOST_ROWS[number]
    for rows in (1, most):
        traced = Traced(step, rows)
        traced.assert_same(rows)
        assert not traced.kernels_sent()
    traced = Traced(step, most + 1)
    traced.assert_same(most + 1)
    assert traced.kernels_sent() == ["ReadVariableOp"] * number


@pytest.mark.parametrize(("step", "number"), [(forward, 1), (backward, 2)])
def test_how_many_they_are_may_be_known_only_when_they_come(step: Any, number: int) -> None:
    traced = Traced(step)
    assert not traced.kernels_sent()
    for rows in (0, 1, MOST_ROWS[number], MOST_ROWS[number] + 1, 300):
        traced.assert_same(rows)


@pytest.mark.parametrize(("step", "number"), [(forward, 1), (backward, 2)])
def test_either_the_kernel_is_sent_or_what_it_is_multiplied_with(step: Any, number: int) -> None:
    with tf.device(THERE):
        kernel = tf.Variable(tf.zeros([INPUTS, OUTPUTS]))

    @tf.function(input_signature=[tf.TensorSpec([None, INPUTS])], autograph=False)
    def sent(x: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with tf.device(HERE):
            result = step(x, kernel)
        result = placed(graph, result, tf.shape(x, out_type=tf.int64)[0])
        there = [each for each in graph.get_operations() if each.device == THERE]
        parts = [each.outputs[0] for each in there if each.type == "StridedSlice"]
        matrices = [each.inputs[0] for each in there if each.type == "MatMul"]
        # The result is used, or the conditional would not be made; and a shape might be what TensorFlow expects.
        return result, parts, matrices

    for rows, is_sent in ((0, False), (MOST_ROWS[number], False), (MOST_ROWS[number] + 1, True)):
        _, parts, matrices = sent(tf.zeros([rows, INPUTS]))
        assert [part.numpy().shape for part in parts] == [(INPUTS if is_sent else 0, OUTPUTS)]
        assert [len(matrix.numpy()) for matrix in matrices] == [0 if is_sent else rows] * number


def written_between(x: tf.Tensor, kernel: tf.Variable) -> Any:
    first = tf.matmul(x, kernel)
    kernel.assign_add(tf.ones_like(kernel))
    return first, tf.matmul(x, kernel)


@pytest.mark.parametrize(
    ("step", "stays"),
    [
        (lambda x, kernel: tf.matmul(x, tf.identity(kernel)), True),
        (lambda x, kernel: (tf.matmul(x, kernel), tf.matmul(x, kernel)), True),
        (lambda x, kernel: tf.IndexedSlices(tf.matmul(x, kernel), tf.range(tf.shape(x)[0])), True),
        (lambda x, kernel: tf.nn.bias_add(tf.matmul(x, kernel), tf.ones([OUTPUTS])), True),
        (lambda x, kernel: tf.matmul(tf.tile(x, [2, 1]), kernel), True),
        (lambda x, kernel: tf.matmul(tf.matmul(x, kernel), kernel, transpose_b=True), True),
        (lambda x, kernel: tf.matmul(tf.matmul(tf.matmul(x, kernel), kernel, transpose_b=True), tf.eye(INPUTS)), True),
        (lambda x, kernel: tf.matmul(x, kernel) + tf.nn.l2_loss(kernel), False),
        (lambda x, kernel: (tf.matmul(x, kernel), tf.identity(kernel) * 2.0), False),
        (lambda x, kernel: tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(kernel, tf.bfloat16)), False),
        (lambda x, kernel: tf.matmul(kernel, x, transpose_a=True, transpose_b=True), False),
        (lambda x, kernel: tf.matmul(x, tf.matmul(kernel, kernel, transpose_b=True)), False),
        (lambda x, kernel: tf.cond(x[0, 0] > 0.0, lambda: tf.matmul(x, kernel), lambda: tf.matmul(-x, kernel)), None),
    ],
    ids=[
        "copied",
        "twice",
        "composite",
        "biased",
        "more rows",
        "tied",
        "tied, and a constant",
        "regularized",
        "read",
        "mixed precision",
        "left",
        "by itself",
        "branch",
    ],
)
@pytest.mark.parametrize("rows", [8, None])
def test_how_a_kernel_is_used(step: Any, stays: bool | None, rows: int | None) -> None:
    traced = Traced(step, rows)
    for given in (8, 100) if rows is None else (rows,):
        traced.assert_same(given)
    if stays is not None:
        assert (not traced.kernels_sent()) == stays


@pytest.mark.parametrize(
    ("layers", "is_there"),
    [
        (lambda x: tf.reshape(x, [tf.shape(x)[0], 6 * 50]), True),
        (lambda x: tf.nn.relu(tf.reshape(x, [-1, INPUTS])) + 1.0, True),
        (lambda x: tf.reshape(tf.repeat(x, 50, axis=2), [-1, INPUTS]), False),
        (lambda x: tf.reshape(tf.tile(x, [1, tf.shape(x)[0], 6]), [-1, INPUTS]), False),
    ],
    ids=["flattened", "and more", "positions", "who knows"],
)
def test_only_examples_are_expected_to_be_as_few_as_the_examples(layers: Callable[[Any], Any], is_there: bool) -> None:
    with tf.device(THERE):
        kernel = tf.Variable(tf.zeros([INPUTS, OUTPUTS]))

    @tf.function(input_signature=[tf.TensorSpec([None, 6, 50])], autograph=False)
    def step(x: tf.Tensor) -> Any:
        with tf.device(HERE):
            result = forward(layers(x), kernel)
        return placed(tf.compat.v1.get_default_graph(), result, tf.shape(x, out_type=tf.int64)[0])

    operations = step.get_concrete_function().graph.get_operations()
    assert any(each.type == "MatMul" and each.device == THERE for each in operations) == is_there


def test_a_known_number_of_rows_counts_beside_those_that_come() -> None:
    def both(rows: int) -> Callable[[Any, Any], Any]:
        return lambda x, kernel: (tf.matmul(x, kernel), tf.matmul(tf.ones([rows, INPUTS]), kernel))

    for rows, is_there in ((MOST_ROWS[1] - 32, True), (MOST_ROWS[1] - 31, False)):
        traced = Traced(both(rows))
        operations = traced.function.graph.get_operations()
        assert any(each.type == "MatMul" and each.device == THERE for each in operations) == is_there
        for given in (8, 32, 33, 100):
            traced.assert_same(given)


@pytest.mark.parametrize("rows", [8, None])
def test_each_product_is_with_what_was_read_for_it(rows: int | None) -> None:
    traced = Traced(written_between, rows)
    for given in (8, 100) if rows is None else (rows,):
        traced.assert_same(given)
    assert any(each.type == "MatMul" and each.device == THERE for each in traced.function.graph.get_operations())


def test_a_kernel_may_be_used_where_it_is_as_well() -> None:
    def step(x: tf.Tensor, kernel: tf.Variable) -> Any:
        with tf.device(kernel.device):
            decayed = tf.reduce_sum(kernel.read_value() * 0.1)
        return tf.matmul(x, kernel), decayed

    traced = Traced(step, 8)
    traced.assert_same(8)
    assert not traced.kernels_sent()


@pytest.mark.parametrize(("job", "is_moved"), [("localhost", False), ("chief", False), ("ps", True)])
def test_a_kernel_of_the_chief_is_not_multiplied_there(job: str, is_moved: bool) -> None:
    """The chief's job is called localhost in a cluster that tfdist joins."""
    home = f"/job:{job}/replica:0/task:0/device:CPU:0"
    with tf.Graph().as_default(), tf.device(home):
        outer = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[INPUTS, OUTPUTS])

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
                kernel = tf.raw_ops.ReadVariableOp(resource=outer, dtype=tf.float32)
                kernel.set_shape([INPUTS, OUTPUTS])
                result = tf.matmul(x, kernel)
            return rewrites.at_the_kernel(tf.compat.v1.get_default_graph(), result, lambda *shape: 64)

        traced = step.get_concrete_function(tf.TensorSpec([8, INPUTS]))
    (product,) = [each for each in traced.graph.get_operations() if each.type == "MatMul"]
    assert (product.device == home) == is_moved
