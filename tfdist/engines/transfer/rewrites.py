# SPDX-License-Identifier: Apache-2.0
"""Products with the kernel of a large dense layer are made where the kernel is, once a step is traced.

With few examples the layer's inputs and outputs are far smaller than its kernel. So a worker sends the inputs and gets
the outputs, instead of the kernel. Likewise it sends the gradient of the outputs and gets that of the inputs. The
kernel is read once for both, as ever: that another worker updates it in between makes no difference to this step.

    worker                            parameter server
      inputs (n, i)          -->        read the kernel (i, o), multiply
      outputs (n, o)         <--
      gradient of the
      outputs (n, o)         -->        multiply with what was read
      gradient of the
      inputs (n, i)          <--

Together with `Factors` the kernel never leaves its parameter server.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.keras import models, placement
from tfdist.compat.keras.optimizers import UPDATE, optimizers_of, parts_of, patched_attributes
from tfdist.compat.tensorflow import graphs, replicas, variables
from tfdist.tables.coordinated_variable import CoordinatedVariable
from tfdist.transport.bundles import Bundles, is_small


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
        if known + USUAL_ROWS * unknown > most:
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
        graphs.give_input(self.operation, 1, self.kernel)
        graphs.place_operation(self.operation, device)

    def made_where(self, are_few: tf.Tensor, kernel_or_nothing: tf.Tensor, device: str) -> tf.Tensor:
        """Places the product on the device of the kernel if its rows are few, else on this one.

        Args:
          are_few: whether they are.
          kernel_or_nothing: without rows if they are few.
          device: where the kernel is.

        Returns:
          Replacement for each consumer of `old`.
        """
        here, users, matrix = self.operation.device, self.old.consumers(), self.matrix
        with tf.device(here):
            sent = matrix[: tf.shape(matrix)[0] * tf.cast(are_few, tf.int32)]
        graphs.give_input(self.operation, 0, sent)
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
                    graphs.give_input(user, index, new)
        return new


# The gradient of a large dense layer's kernel is multiplied where the kernel is, while a Keras step is traced.
#
# That gradient is the product of two thin matrices of one row per example: the layer's inputs, transposed, and the
# gradient of its outputs. With few examples both together are far smaller than their product, so a worker sends them,
# and the parameter server multiplies. The product is the same; where it is made changes only its rounding, if at all.
# This is how Project Adam sends the gradients of fully connected layers (Chilimbi et al., "Project Adam: Building an
# Efficient and Scalable Deep Learning Training System", OSDI 2014, section 3.2), and Poseidon those of layers where it
# is less to send (Zhang et al., arXiv:1706.03292, section 3.2).
#
#     worker                           parameter server
#       inputs (n, i)         -->        gradient (i, o) = inputs^T gradient of the outputs
#       gradient of the
#       outputs (n, o)        -->        update
#
# Whatever else is done to a gradient before the update (clipping, the sum with a regularizer's, loss scaling) is done
# on the worker, and then the gradient is sent as it is.


# The product has to be at least so much larger than its factors.
_LEAST_SAVING = 2
# Number of rows where it is not known: Keras' default size of a batch.
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
        product = _outer_product(self.left[kept:, :columns], self.right[kept:])
        return [self.left[:kept], self.right[:kept], product]

    def received(self, left: tf.Tensor, right: tf.Tensor, product: tf.Tensor | None = None) -> tf.Tensor:
        """The gradient from what was sent, to be made where its variable is."""
        if product is None:
            return _outer_product(left, right)
        # A part of a conditional is where its inputs come from: here, and not on the worker.
        left, right, product = (tf.identity(each) for each in (left, right, product))
        gradient = tf.cond(tf.size(product) > 0, lambda: product, lambda: _outer_product(left, right))
        return tf.ensure_shape(gradient, self._shape)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.left.shape[1], self.right.shape[1]


def _outer_product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.matmul(left, right, transpose_a=True)


def factors_of(gradient: tf.Tensor, most_rows: Callable[[int, int], int]) -> Factors | None:
    """Returns the factors of a gradient, if sending them may be better than sending the gradient.

    Args:
      gradient: a tensor of the graph that is being traced.
      most_rows: given the shape of a large gradient, returns the most rows of factors that are sent instead.
    """
    if not tf.is_symbolic_tensor(gradient) or gradient.graph is not tf.compat.v1.get_default_graph():
        return None
    product = gradient.op
    # Only TensorFlow's product for the gradient of a kernel.
    if product.type != "MatMul" or not product.get_attr("transpose_a") or product.get_attr("transpose_b"):
        return None
    if is_small(gradient) or any(each.shape.rank != 2 or each.shape[1] is None for each in product.inputs):
        return None
    left, right = product.inputs
    factors = Factors(left, right, most_rows(left.shape[1], right.shape[1]))
    rows = USUAL_ROWS if factors.rows is None else factors.rows
    return factors if rows <= factors.most_rows else None


# Rows of a variable are gathered where the variable is, once a step is traced.


def at_the_table(graph: Any) -> None:
    """Places embedding gathers on the device of the table.

    Keras gathers from what it has read: else the whole table would be sent to the worker for a few of its rows.

    Args:
      graph: a graph whose variables are captured, as it is being traced.
    """
    devices = {inner.name: outer.device for outer, inner in graph.captures if outer.dtype == tf.resource}
    for operation in graph.get_operations():
        if operation.type not in ("GatherV2", "GatherNd", "Shape"):
            continue
        chain = [operation]
        while chain[-1].inputs[0].op.type in ("Identity", "Cast"):
            chain.append(chain[-1].inputs[0].op)
        read = chain[-1].inputs[0].op
        if read.type == "ReadVariableOp" and read.inputs[0].name in devices:
            for each in chain:
                graphs.place_operation(each, devices[read.inputs[0].name])


# Small variables travel together between parameter servers and a worker, while a Keras step is traced.
#
# What costs time for a bias or a scale is not its bytes but the round trip. So a step reads all small variables of a
# parameter server as one vector, and sends their gradients back as one. A model of 40 small layers trains more than
# twice as fast so. With them go the factors that a large gradient is sent as (`Factors`), if they are small.
#
#     parameter server                 worker
#       read, concatenate     -->      split, compute, concatenate the gradients
#       split, update         <--


# A larger variable may be a table of which a step needs a few rows: they are gathered on its device, if it is not read
# ahead.
_MOST_ELEMENTS_READ = 1 << 14


@contextlib.contextmanager
def travel_together(model: keras.Model, worker: str, most_rows: Callable[[int, int], int]) -> Iterator[None]:
    """Within this block, a train step of `model` reads small weights, and sends their gradients, together.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
      most_rows: see `factors_of`.
    """
    optimizers = optimizers_of(model)
    found = [part for optimizer in optimizers for part in parts_of(optimizer)]
    optimizers = {id(each): each for each in found if hasattr(each, UPDATE)}.values()
    updates = [(each, UPDATE, _update(each, worker, most_rows)) for each in optimizers]
    with read_together(model, worker), patched_attributes(updates):
        yield


@contextlib.contextmanager
def read_together(model: keras.Model, worker: str) -> Iterator[None]:
    """Within this block, the step of `model` that is traced finds its small weights read already.

    A variable is read anew if the step has written it, or if it is read within a conditional, a loop or an update of
    its own.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
    """
    groups = _small_weights(model, worker)
    with _read_ahead([pair for (_, _, reader), group in groups.items() for pair in _read(group, reader)]):
        yield


@contextlib.contextmanager
def read_rounded(model: keras.Model, worker: str, dtype: tf.DType) -> Iterator[None]:
    """Within this block, the step of `model` that is traced reads its trainable weights rounded to `dtype`.

    They are rounded on their parameter servers, small ones together, and have their own dtype again on the worker.
    Embedding tables are not rounded, because a step reads single rows of them; nor are partitioned variables.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
      dtype: `tf.float16` or `tf.bfloat16`.
    """
    tables = {id(layer.embeddings) for layer in models.layers_of(model) if isinstance(layer, keras.layers.Embedding)}
    weights = [weight for weight in model.trainable_weights if id(weight) not in tables]
    rounded = [_own(weight) for weight in weights]
    groups: dict[Any, list[CoordinatedVariable]] = collections.defaultdict(list)
    for variable in rounded:
        if variable is not None and variable.dtype.size > dtype.size:
            groups[variable.device, variable.dtype].append(variable)
    chosen = {id(variable) for group in groups.values() for variable in group}
    small = _small_weights(model, worker).values()
    others = [[each for each in group if id(each) not in chosen] for group in small]
    pairs = [pair for group in others if group for pair in _read(group, worker)]
    pairs += [pair for group in groups.values() for pair in _read(group, worker, dtype)]
    with _read_ahead(pairs):
        yield


@contextlib.contextmanager
def _read_ahead(ahead: Sequence[tuple[CoordinatedVariable, tf.Tensor]]) -> Iterator[None]:
    for variable, value in ahead:
        variable.read_ahead(value)
    try:
        yield
    finally:
        for variable, _ in ahead:
            variable.read_ahead(None)


def _small_weights(model: keras.Model, worker: str) -> dict[tuple[str, tf.DType, str], list[CoordinatedVariable]]:
    """Returns groups of two or more small variables of one parameter server and dtype that one device reads."""
    groups: dict[Any, list[CoordinatedVariable]] = collections.defaultdict(list)
    for weight in model.weights:
        variable = _own(weight)
        if variable is not None and is_small(variable, _MOST_ELEMENTS_READ):
            groups[variable.device, variable.dtype, placement.reader_of(weight, worker)].append(variable)
    return {key: group for key, group in groups.items() if len(group) > 1}


def _own(weight: Any) -> CoordinatedVariable | None:
    """Returns the floating-point variable of a weight that is on one parameter server, or None."""
    variable = variables.tf_variable(weight)
    # Not a subclass: a partitioned variable is on several parameter servers.
    is_own = type(variable) is CoordinatedVariable and variable.dtype.is_floating
    return variable if is_own else None


def _read(
    group: Sequence[CoordinatedVariable], worker: str, sent_dtype: tf.DType | None = None
) -> Iterator[tuple[CoordinatedVariable, tf.Tensor]]:
    dtype = group[0].dtype
    bundles = Bundles([tf.TensorSpec(each.shape, sent_dtype or dtype) for each in group], [worker] * len(group))
    with tf.device(group[0].device):
        packed = bundles.pack([tf.cast(each.read_value(), sent_dtype or dtype) for each in group])
    values = bundles.unpack(packed)
    with tf.device(worker):
        return zip(group, [tf.cast(value, dtype) for value in values], strict=True)


def _update(optimizer: Any, worker: str, most_rows: Callable[[int, int], int]) -> Callable[..., None]:
    original = getattr(optimizer, UPDATE)

    def update(distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        pairs = list(grads_and_vars)
        dense = [
            index
            for index, (gradient, variable) in enumerate(pairs)
            if isinstance(gradient, tf.Tensor) and type(variable) is CoordinatedVariable
        ]
        devices = [pairs[index][1].device for index in dense]
        gradients = _sent([pairs[index][0] for index in dense], devices, worker, most_rows)
        for index, gradient in zip(dense, gradients, strict=True):
            pairs[index] = gradient, pairs[index][1]
        original(distribution, pairs, learning_rate)

    return update


def _sent(
    gradients: Sequence[tf.Tensor], devices: Sequence[str], worker: str, most_rows: Callable[[int, int], int]
) -> list[tf.Tensor]:
    """The gradients as they are on these devices, or on the worker, where each of them is sent by itself."""
    factors = [factors_of(gradient, most_rows) for gradient in gradients]
    # A worker may span several devices.
    homes = [home or worker for home in replicas.homes_of(tf.distribute.get_strategy(), gradients)]
    parts = []
    for each, gradient, home in zip(factors, gradients, homes, strict=True):
        with tf.device(home):
            parts.append(each.sent() if each else [gradient])
    flat = [part for each in parts for part in each]
    destinations, origins = (
        [device for each, device in zip(parts, given, strict=True) for _ in each] for given in (devices, homes)
    )
    bundles = Bundles(flat, destinations, origins)
    packed = bundles.pack(flat)
    arrived, received = iter(bundles.unpack(packed)), []
    for each, sent, device in zip(factors, parts, devices, strict=True):
        tensors = [next(arrived) for _ in sent]
        with tf.device(device):
            received.append(each.received(*tensors) if each else tensors[0])
    return received
