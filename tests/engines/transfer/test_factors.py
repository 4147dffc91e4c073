# SPDX-License-Identifier: Apache-2.0
"""A gradient that is sent as its factors is the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.engines.transfer import plan
from tfdist.engines.transfer.plan import MOST_ROWS, Factors

INPUTS, OUTPUTS = 300, 400


def sent_and_received(rows: int, is_known: bool) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Returns the factors of a dense layer's gradient that are sent, their product, and the gradient."""
    random = np.random.default_rng(rows)
    x, kernel = (random.normal(size=shape).astype(np.float32) for shape in ((rows, INPUTS), (INPUTS, OUTPUTS)))

    @tf.function(input_signature=[tf.TensorSpec([rows if is_known else None, INPUTS])])
    def step(x: tf.Tensor) -> Any:
        variable = tf.constant(kernel)
        with tf.GradientTape() as tape:
            tape.watch(variable)
            loss = tf.reduce_sum(tf.tanh(x @ variable))
        gradient = tape.gradient(loss, variable)
        found = plan.factors_of(gradient)
        sent = found.sent() if found else [gradient]
        return sent, found.received(*sent) if found else gradient, gradient

    sent, received, gradient = step(x)
    return [each.numpy() for each in sent], received.numpy(), gradient.numpy()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 32, MOST_ROWS, MOST_ROWS + 1, 300])
def test_it_is_the_gradient_and_less_to_send(rows: int, is_known: bool) -> None:
    sent, received, gradient = sent_and_received(rows, is_known)
    np.testing.assert_array_equal(received, gradient)
    few = rows * (INPUTS + OUTPUTS)
    assert sum(each.size for each in sent) == (few if rows <= MOST_ROWS else INPUTS * OUTPUTS)


def factors_of(left: Sequence[int | None] | None, right: Sequence[int | None], **transpose: bool) -> Factors | None:
    with tf.Graph().as_default():
        a, b = (tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape) for shape in (left, right))
        return plan.factors_of(tf.matmul(a, b, **transpose))


def test_what_is_no_gradient_of_a_large_kernel_is_sent_as_it_is() -> None:
    assert factors_of([8, 512], [8, 512], transpose_a=True)
    assert factors_of([None, 512], [None, 512], transpose_a=True)
    assert not factors_of([8, 100], [8, 100], transpose_a=True), "travels with others"
    assert not factors_of([8, 4], [8, 40_000], transpose_a=True), "the factors are hardly smaller"
    assert not factors_of([None, 40], [None, 40_000], transpose_a=True), "nor are those of a usual batch"
    assert not factors_of([8, None], [8, 512], transpose_a=True), "of unknown size"
    assert not factors_of(None, [8, 512], transpose_a=True), "of unknown rank"
    assert not factors_of([512, 8], [8, 512]), "another product"


def test_a_gradient_that_was_there_before_is_sent_as_it_is() -> None:
    assert not plan.factors_of(tf.matmul(tf.ones([8, 512]), tf.ones([8, 512]), transpose_a=True))


@pytest.mark.parametrize(
    ("loss", "is_product"),
    [
        (lambda x, kernel: tf.matmul(x, kernel), True),
        (lambda x, kernel: tf.matmul(x, kernel, transpose_b=True), True),
        (lambda x, kernel: tf.matmul(tf.matmul(x, kernel), kernel, transpose_b=True), False),
        (lambda x, kernel: tf.reduce_sum(tf.matmul(x, kernel)) + tf.nn.l2_loss(kernel), False),
        (lambda x, kernel: tf.tensordot(x[:, tf.newaxis] * tf.ones([1, 3, 1]), kernel, 1), True),
        (lambda x, kernel: tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(kernel, tf.bfloat16)), False),
    ],
    ids=["kernel", "transposed", "tied", "regularized", "sequences", "mixed precision"],
)
def test_how_a_kernel_is_used(loss: Callable[[Any, Any], Any], is_product: bool) -> None:
    found = []

    @tf.function
    def step(x: tf.Tensor, kernel: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            value = loss(x, kernel)
        gradient = tape.gradient(value, kernel)
        found.append(plan.factors_of(gradient))
        return found[-1].received(*found[-1].sent()) if found[-1] else gradient, gradient

    random = np.random.default_rng(0)
    x, kernel = (random.normal(size=shape).astype(np.float32) for shape in ((8, 300), (300, 300)))
    received, gradient = step(x, kernel)
    assert [each is not None for each in found] == [is_product]
    np.testing.assert_array_equal(received, gradient)


def test_what_another_graph_multiplies_is_sent_as_it_is() -> None:
    with tf.Graph().as_default():
        product = tf.matmul(tf.ones([8, 512]), tf.ones([8, 512]), transpose_a=True)
    with tf.Graph().as_default():
        assert not plan.factors_of(product)
