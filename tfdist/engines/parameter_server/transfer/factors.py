# SPDX-License-Identifier: Apache-2.0
"""The gradient of a large dense layer's kernel is multiplied where the kernel is, while a Keras step is traced.

That gradient is the product of two thin matrices of one row per example: the layer's inputs, transposed, and the
gradient of its outputs. With few examples both together are far smaller than their product, so a worker sends them,
and the parameter server multiplies. The product is the same; where it is made changes only its rounding, if at all.
This is how Project Adam sends the gradients of fully connected layers (Chilimbi et al., "Project Adam: Building an
Efficient and Scalable Deep Learning Training System", OSDI 2014, section 3.2), and Poseidon those of layers where it
is less to send (Zhang et al., arXiv:1706.03292, section 3.2).

    worker                           parameter server
      inputs (n, i)         -->        gradient (i, o) = inputs^T gradient of the outputs
      gradient of the
      outputs (n, o)        -->        update

Whatever else is done to a gradient before the update (clipping, the sum with a regularizer's, loss scaling) is done on
the worker, and then the gradient is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist.engines.parameter_server.transfer.bundles import is_small

# The product has to be at least so much larger than its factors.
_LEAST_SAVING = 2
# How many rows there will be if that is not known: what Keras takes for the size of a batch.
USUAL_ROWS = 32


def saving_rows(inputs: int, outputs: int) -> int:
    """Up to so many rows, two matrices are far smaller than their product of shape (inputs, outputs)."""
    return inputs * outputs // (_LEAST_SAVING * (inputs + outputs))


class Factors(NamedTuple):
    """A gradient of shape (i, o) as the product left^T right.

    Attributes:
      left: (n, i), a tensor of the graph that is being traced.
      right: (n, o), likewise.
      most_rows: as long as n is not larger, they are sent rather than the product.
    """

    left: tf.Tensor
    right: tf.Tensor
    most_rows: int

    @property
    def rows(self) -> int | None:
        """n, if it is known while tracing."""
        return self.left.shape[0]

    def sent(self) -> list[tf.Tensor]:
        """The tensors to send, made on the worker: both, and, if n is not known, the product of their other rows.

        Either the factors or the product is without elements then. A conditional around the sending would have worker
        and parameter server wait for each other's decision.
        """
        if self.rows is not None:
            return [self.left, self.right]
        rows = tf.shape(self.left)[0]
        are_few = tf.cast(rows <= self.most_rows, tf.int32)
        kept, columns = rows * are_few, self._shape[0] * (1 - are_few)
        product = _product(self.left[kept:, :columns], self.right[kept:])
        return [self.left[:kept], self.right[:kept], product]

    def received(self, left: tf.Tensor, right: tf.Tensor, product: tf.Tensor | None = None) -> tf.Tensor:
        """The gradient from what was sent, to be made where its variable is."""
        if product is None:
            return _product(left, right)
        # A part of a conditional is where its inputs come from: here, and not on the worker.
        left, right, product = (tf.identity(each) for each in (left, right, product))
        gradient = tf.cond(tf.size(product) > 0, lambda: product, lambda: _product(left, right))
        return tf.ensure_shape(gradient, self._shape)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.left.shape[1], self.right.shape[1]


def _product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.matmul(left, right, transpose_a=True)


def of(gradient: tf.Tensor, most_rows: Callable[[int, int], int]) -> Factors | None:
    """Returns the factors of a gradient, if sending them may be better than sending the gradient.

    Args:
      gradient: a tensor of the graph that is being traced.
      most_rows: given the shape of a large gradient, returns the most rows of factors that are sent instead.
    """
    if not tf.is_symbolic_tensor(gradient) or gradient.graph is not tf.compat.v1.get_default_graph():
        return None
    product = gradient.op
    # What TensorFlow multiplies for the gradient of a kernel.
    if product.type != "MatMul" or not product.get_attr("transpose_a") or product.get_attr("transpose_b"):
        return None
    if is_small(gradient) or any(each.shape.rank != 2 or each.shape[1] is None for each in product.inputs):
        return None
    left, right = product.inputs
    factors = Factors(left, right, most_rows(left.shape[1], right.shape[1]))
    rows = USUAL_ROWS if factors.rows is None else factors.rows
    return factors if rows <= factors.most_rows else None
