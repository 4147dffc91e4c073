# SPDX-License-Identifier: Apache-2.0
"""Form in which variables and gradients cross the network between a worker and the parameter servers.

The form is decided for a strategy, and followed while a step is traced:

    rows of embeddings    gathered where the table is
    small variables       read together, their gradients sent together (`bundles`)
    gradients of kernels  sent as two factors, multiplied on the parameter server, or encoded (`encoding`)
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.keras import models, placement
from tfdist.compat.keras.optimizers import UPDATE, optimizers_of, parts_of, patched_attributes
from tfdist.compat.tensorflow import graphs, replicas, variables
from tfdist.engines.transfer import encoding as encodings
from tfdist.tables.coordinated_variable import CoordinatedVariable
from tfdist.transport.bundles import Bundles, is_small

MODES = ("auto", "plain")


class TransferPlan:
    """The transfer of one strategy.

    Args:
      mode: one of `MODES`; "plain" reads each variable and pushes each gradient as stock TensorFlow does.
      encoding: of the gradients that contributions consist of; None to send them as they are.
    """

    def __init__(self, mode: str, encoding: encodings.Encoding | None = None) -> None:
        self.encoding = encoding
        self._is_plain = mode == "plain"

    def __str__(self) -> str:
        forms = ["embedding rows gathered at the table", "small variables sent together"]
        if self._is_plain:
            forms = ["each variable and gradient sent whole"]
        if self.encoding is not None:
            forms += [f"gradients sent encoded: {self.encoding.codec!r}"]
        elif not self._is_plain:
            forms += [f"gradients of large kernels sent as factors of up to {MOST_ROWS} rows"]
        return ", ".join(forms)

    # Actions of a step while it is traced.

    def reading(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a step of `model` that is traced for `worker` reads variables as decided."""
        dtype = self.encoding.read_dtype if self.encoding else None
        is_stock = self._is_plain and dtype is None
        return contextlib.nullcontext() if is_stock else read_together(model, worker, dtype)

    def training(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, a train step of `model` reads variables and sends gradients as decided."""
        return contextlib.nullcontext() if self._is_plain else travel_together(model, worker)

    def reading_once(self, model: Any, worker: str) -> contextlib.AbstractContextManager[None]:
        """Within this block, steps of `model` that train nothing read its dense weights once."""
        return contextlib.nullcontext() if self._is_plain else read_together(model, worker, once=True)

    def place(self) -> None:
        """Places gathers of the default graph, in which a step was traced, as decided."""
        if not self._is_plain:
            at_the_table(tf.compat.v1.get_default_graph())

    def bundles(self, specs: Sequence[Any], devices: Sequence[str], origins: Sequence[str] = ()) -> Bundles:
        """The tensors of a contribution, bundled as decided."""
        return Bundles(specs, devices, origins, are_apart=self._is_plain)


def check_mode(transfer: Any) -> None:
    """Raises ValueError unless `transfer` is one of `MODES`."""
    if transfer not in MODES:
        raise ValueError(
            f'transfer must be one of {", ".join(map(repr, MODES))}; leave it out for "auto". '
            f"Received: transfer={transfer!r}"
        )


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
# Of a gradient each element that is not sent saves 4 bytes, and costs the server 2 operations for each row. With more
# rows a server of 40 GFLOP/s would multiply for longer than it receives at 10 Gbit/s.
MOST_ROWS = 64
# Number of rows where it is not known: Keras' default size of a batch.
_USUAL_ROWS = 32


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


def factors_of(gradient: tf.Tensor) -> Factors | None:
    """Returns the factors of a gradient of the graph that is being traced, if sending them may be better."""
    if not tf.is_symbolic_tensor(gradient) or gradient.graph is not tf.compat.v1.get_default_graph():
        return None
    product = gradient.op
    # Only TensorFlow's product for the gradient of a kernel.
    if product.type != "MatMul" or not product.get_attr("transpose_a") or product.get_attr("transpose_b"):
        return None
    if is_small(gradient) or any(each.shape.rank != 2 or each.shape[1] is None for each in product.inputs):
        return None
    left, right = product.inputs
    inputs, outputs = left.shape[1], right.shape[1]
    factors = Factors(left, right, min(MOST_ROWS, inputs * outputs // (_LEAST_SAVING * (inputs + outputs))))
    rows = _USUAL_ROWS if factors.rows is None else factors.rows
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
def travel_together(model: keras.Model, worker: str) -> Iterator[None]:
    """Within this block, a train step of a built `model`, traced for the device `worker`, sends small tensors together.

    So it reads small weights, and sends their gradients.
    """
    optimizers = optimizers_of(model)
    found = [part for optimizer in optimizers for part in parts_of(optimizer)]
    optimizers = {id(each): each for each in found if hasattr(each, UPDATE)}.values()
    updates = [(each, UPDATE, _update(each, worker)) for each in optimizers]
    with read_together(model, worker), patched_attributes(updates):
        yield


@contextlib.contextmanager
def read_together(
    model: keras.Model, worker: str, rounded_to: tf.DType | None = None, once: bool = False
) -> Iterator[None]:
    """Within this block, a step of a built `model`, traced for the device `worker`, finds small weights read already.

    A variable is read anew if the step has written it, or if it is read within a conditional, a loop or an update of
    its own.

    With `rounded_to`, trainable weights of any size are read already, and rounded to this dtype on their parameter
    servers; they have their own dtype again on the worker. With `once`, for several steps that are traced within this
    block and train nothing, so are all weights. Not embedding tables, because a step reads single rows of them; nor
    partitioned variables.
    """
    whole = set[int]()
    if rounded_to is not None or once:
        embeddings = (layer for layer in models.layers_of(model) if isinstance(layer, keras.layers.Embedding))
        tables = {id(layer.embeddings) for layer in embeddings if layer.built}
        whole = {id(weight) for weight in (model.weights if once else model.trainable_weights)} - tables
    groups: dict[Any, list[CoordinatedVariable]] = collections.defaultdict(list)
    for weight in model.weights:
        variable = _own(weight)
        # Read already, for several steps.
        if variable is None or variable.ahead is not None:
            continue
        is_rounded = rounded_to is not None and id(weight) in whole and variable.dtype.size > rounded_to.size
        if is_rounded or (once and id(weight) in whole) or is_small(variable, _MOST_ELEMENTS_READ):
            sent_dtype = rounded_to if is_rounded else variable.dtype
            groups[variable.device, variable.dtype, placement.reader_of(weight, worker), sent_dtype].append(variable)
    ahead = [
        pair
        for (_, dtype, reader, sent_dtype), group in groups.items()
        if len(group) > 1 or sent_dtype != dtype or once
        for pair in _read(group, reader, sent_dtype)
    ]
    for variable, value in ahead:
        variable.ahead = value
    try:
        yield
    finally:
        for variable, _ in ahead:
            variable.ahead = None


def _own(weight: Any) -> CoordinatedVariable | None:
    """Returns the floating-point variable of a weight that is on one parameter server, or None."""
    variable = variables.tf_variable(weight)
    # Not a subclass: a partitioned variable is on several parameter servers.
    is_own = type(variable) is CoordinatedVariable and variable.dtype.is_floating
    return variable if is_own else None


def _read(
    group: Sequence[CoordinatedVariable], worker: str, sent_dtype: tf.DType
) -> Iterator[tuple[CoordinatedVariable, tf.Tensor]]:
    dtype = group[0].dtype
    bundles = Bundles([tf.TensorSpec(each.shape, sent_dtype) for each in group], [worker] * len(group))
    with tf.device(group[0].device):
        packed = bundles.pack([tf.cast(each.read_value(), sent_dtype) for each in group])
    values = bundles.unpack(packed)
    with tf.device(worker):
        return zip(group, [tf.cast(value, dtype) for value in values], strict=True)


def _update(optimizer: Any, worker: str) -> Callable[..., None]:
    original = getattr(optimizer, UPDATE)

    def update(distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        pairs = list(grads_and_vars)
        dense = [
            index
            for index, (gradient, variable) in enumerate(pairs)
            if isinstance(gradient, tf.Tensor) and type(variable) is CoordinatedVariable
        ]
        devices = [pairs[index][1].device for index in dense]
        gradients = _sent([pairs[index][0] for index in dense], devices, worker)
        for index, gradient in zip(dense, gradients, strict=True):
            pairs[index] = gradient, pairs[index][1]
        original(distribution, pairs, learning_rate)

    return update


def _sent(gradients: Sequence[tf.Tensor], devices: Sequence[str], worker: str) -> list[tf.Tensor]:
    """The gradients as they are on these devices, or on the worker, where each of them is sent by itself."""
    factors = [factors_of(gradient) for gradient in gradients]
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
