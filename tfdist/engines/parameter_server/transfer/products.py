# SPDX-License-Identifier: Apache-2.0
"""Products with the kernel of a large dense layer are made where the kernel is, once a step is traced.

With few examples the layer's inputs and outputs are far smaller than its kernel. So a worker sends the inputs and gets
the outputs, instead of the kernel; and in the same way the gradient of the inputs for that of the outputs. The kernel
is read once for both, as ever: that another worker updates it in between makes no difference to this step.

    worker                            parameter server
      inputs (n, i)          -->        read the kernel (i, o), multiply
      outputs (n, o)         <--
      gradient of the
      outputs (n, o)         -->        multiply with what was read
      gradient of the
      inputs (n, i)          <--

Together with `factors` the kernel never leaves its parameter server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import graph_edits
from tfdist.engines.parameter_server.transfer import factors
from tfdist.engines.parameter_server.transfer.bundles import is_small


def _is_server(device: str) -> bool:
    return tf.DeviceSpec.from_string(device).job == "ps"


def at_the_kernel(
    graph: Any,
    result: Any,
    most_rows: Callable[[int, int], int],
    batch_rows: tf.Tensor | None = None,
    is_server: Callable[[str], bool] = _is_server,
) -> Any:
    """Places products of a kernel with matrices of few rows on the device of the kernel.

    Args:
      graph: the default graph, whose variables are captured, as it is being traced.
      result: what the step returns, a structure.
      most_rows: given the shape of a kernel, returns the most rows that are multiplied where it is.
      batch_rows: the number of the step's examples, int64, a scalar of the graph. Where the rows of matrices are not
        known while tracing, but are examples, it is by this number that it is decided when they come: what comes from
        the examples is there only after the layers below, and until then the kernel could be on its way.
      is_server: whether a device is one of a parameter server. The chief has other things to do.

    Returns:
      What the step is to return instead of `result`.
    """
    replaced: dict[Any, tf.Tensor] = {}
    for device, kernels in _large_matrices(graph, is_server):
        found = [_product(*user) for kernel in kernels for user in _users(kernel, kernel, device)]
        products = [product for product in found if product is not None]
        if not products or len(products) < len(found):
            continue
        rows = [product.matrix.shape[0] for product in products]
        known, unknown = sum(each or 0 for each in rows), rows.count(None)
        most = most_rows(*kernels[0].shape)
        if known + factors.USUAL_ROWS * unknown > most:
            continue
        if not unknown:
            for product in products:
                product.move(device)
        elif batch_rows is not None and _rows_are_examples(products[rows.index(None)].matrix):
            with tf.device(batch_rows.device):
                are_few = known + batch_rows * unknown <= most
            parts = {kernel.ref(): _all_or_nothing(kernel, are_few, device) for kernel in kernels}
            for product in products:
                replaced[product.old.ref()] = product.made_where(are_few, parts[product.kernel.ref()], device)
    if not replaced:
        return result
    return tf.nest.map_structure(
        lambda leaf: replaced.get(leaf.ref(), leaf) if tf.is_symbolic_tensor(leaf) else leaf,
        result,
        expand_composites=True,
    )


def _large_matrices(graph: Any, is_server: Callable[[str], bool]) -> Iterator[tuple[str, list[tf.Tensor]]]:
    """Each large variable that is a matrix: where it is, and the reads of it."""
    devices = {
        inner.ref(): outer.device
        for outer, inner in graph.captures
        if outer.dtype == tf.resource and is_server(outer.device)
    }
    reads: dict[Any, list[tf.Tensor]] = {handle: [] for handle in devices}
    for operation in graph.get_operations():
        if operation.type == "ReadVariableOp" and operation.inputs[0].ref() in reads:
            reads[operation.inputs[0].ref()].append(operation.outputs[0])
    for handle, values in reads.items():
        if values and values[0].shape.rank == 2 and values[0].shape.is_fully_defined() and not is_small(values[0]):
            yield devices[handle], values


def _rows_are_examples(matrix: tf.Tensor) -> bool:
    """Returns True if each row is one example: no operation before it reshapes an example into several rows."""
    found, to_do = {matrix.op}, [matrix.op]
    while to_do:
        operation = to_do.pop()
        if operation.type == "Reshape" and not _keeps_rows(operation.inputs[0].shape, operation.outputs[0].shape):
            return False
        before = {tensor.op for tensor in operation.inputs} - found
        found |= before
        to_do += before
    return True


def _keeps_rows(before: tf.TensorShape, after: tf.TensorShape) -> bool:
    if before.is_fully_defined():
        return True  # of no examples
    sizes = [shape[1:].num_elements() if shape.rank else None for shape in (before, after)]
    return None not in sizes and sizes[0] == sizes[1]


def _users(read: tf.Tensor, copy: tf.Tensor, device: str) -> Iterator[tuple[tf.Operation, tf.Tensor, tf.Tensor]]:
    """Yields (operation, copy, read) for each operation on another device that uses a copy of a variable's read."""
    for operation in copy.consumers():
        if operation.type == "Identity":
            yield from _users(read, operation.outputs[0], device)
        elif operation.device != device:
            yield operation, copy, read


def _product(operation: tf.Operation, copy: tf.Tensor, read: tf.Tensor) -> Product | None:
    if operation.type != "MatMul" or operation.get_attr("transpose_a"):
        return None
    matrix, factor = operation.inputs
    return Product(operation, read) if factor is copy and matrix is not copy and matrix.shape[1] else None


def _all_or_nothing(kernel: tf.Tensor, is_nothing: tf.Tensor, device: str) -> tf.Tensor:
    # A conditional around the sending would have both sides wait for each other's decision. A slice is no copy.
    with tf.device(device):
        part = kernel[: kernel.shape[0] * (1 - tf.cast(is_nothing, tf.int32))]
        # A number of rows that is found out while tracing does not fit the product in the branch that is not taken.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=[None, kernel.shape[1]])


@dataclasses.dataclass(frozen=True)
class Product:
    """An operation that multiplies a matrix by a kernel, or by the transposed kernel.

    Attributes:
      operation: a "MatMul" on the worker.
      kernel: what was read of the variable.
    """

    operation: tf.Operation
    kernel: tf.Tensor

    @property
    def matrix(self) -> tf.Tensor:
        """Tensor that is multiplied by the kernel; it changes if another product, now replaced, made it."""
        return self.operation.inputs[0]

    @property
    def old(self) -> tf.Tensor:
        """Result of the original product."""
        return self.operation.outputs[0]

    def move(self, device: str) -> None:
        """Places the product on a device, and has it read the kernel itself, not a copy on another device."""
        graph_edits.give(self.operation, 1, self.kernel)
        graph_edits.place(self.operation, device)

    def made_where(self, are_few: tf.Tensor, kernel_or_nothing: tf.Tensor, device: str) -> tf.Tensor:
        """Places the product on the device of the kernel if its rows are few, else on this one.

        Args:
          are_few: whether they are.
          kernel_or_nothing: without rows if they are few.
          device: where the kernel is.

        Returns:
          What those who had been given `old` have been given instead.
        """
        here, users, matrix = self.operation.device, self.old.consumers(), self.matrix
        with tf.device(here):
            sent = matrix[: tf.shape(matrix)[0] * tf.cast(are_few, tf.int32)]
        graph_edits.give(self.operation, 0, sent)
        self.move(device)
        transpose = self.operation.get_attr("transpose_b")
        with tf.device(here):
            # A part of a conditional is where its inputs come from.
            there, matrix, kernel = (tf.identity(each) for each in (self.old, matrix, kernel_or_nothing))
            new = tf.cond(are_few, lambda: there, lambda: tf.matmul(matrix, kernel, transpose_b=transpose))
        new.set_shape(self.old.shape)
        for user in users:
            for index, given in enumerate(user.inputs):
                if given is self.old:
                    graph_edits.give(user, index, new)
        return new
