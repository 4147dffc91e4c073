# SPDX-License-Identifier: Apache-2.0
"""A variable sharded by rows over several parameter servers, with an interface that Keras 3 can use.

TensorFlow's `ShardedVariable` (of a strategy with a `variable_partitioner`) has no handle, so neither gradient tapes
nor Keras' optimizers support it. Here the whole variable is read once per step, by concatenating the shards, and this
read is the handle: gradients are taken with respect to it. Writes are split into the shards.

Source of the layout: "div" partitioning of `tf.distribute.experimental.ParameterServerStrategy`: consecutive rows,
the first shards one row larger where the rows don't divide evenly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import enclosing_graphs, server_variables
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable

VARIABLE_VALUE = "VARIABLE_VALUE"


class PartitionedVariable(CoordinatedVariable):
    """Several shards with the interface of one variable.

    Args:
      shards: The stock `ShardedVariable`.
      barrier: See `CoordinatedVariable`.
    """

    def __init__(self, shards: server_variables.ShardedVariable, barrier: Callable[..., None]):
        super().__init__(_Whole(shards), barrier)

    @property
    def handle(self) -> tf.Tensor:
        """Tensor that gradients are taken with respect to: the first read of this step."""
        value = self.stored.value()
        return value if tf.executing_eagerly() else self.stored.first_read()

    @property
    def trainable(self) -> bool:
        """True if gradient tapes watch the variable."""
        return self.stored.trainable

    @property
    def _shared_name(self) -> str:
        return self.stored.name

    @property
    def variables(self) -> list[tf.Variable]:
        """The shards."""
        return self.stored.variables

    def _match_scaling(self, value: Any) -> None:
        """Returns None: the fused gradient descent is for single variables; each shard is assigned its rows."""

    def _handles(self) -> list[Any]:
        return [shard.handle for shard in self.variables]

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        raise NotImplementedError  # Makes checkpoints use the two methods below, which know nothing of partitions.

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self._barrier(writes=False)
        return {VARIABLE_VALUE: self.stored.value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return self.assign(restored_tensors[VARIABLE_VALUE])


class _Whole:
    """`ShardedVariable` with the missing parts of a variable's interface."""

    def __init__(self, shards: server_variables.ShardedVariable):
        self._shards = shards
        self._sizes = [shard.shape.as_list()[0] for shard in shards.variables]
        self._read: tuple[weakref.ref, tf.Tensor] | None = None
        self._first: tuple[weakref.ref, tf.Tensor] | None = None
        self.trainable = shards.variables[0].trainable
        self.device = shards.variables[0].device
        self.variables = list(shards.variables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shards, name)

    def value(self) -> tf.Tensor:
        """Returns the whole value; within one graph it is read once between two writes."""
        if tf.executing_eagerly():
            return self._concatenated()
        value = _of_this_graph(self._read)
        if value is None:
            value = self._concatenated()
            self._read = (weakref.ref(value.graph), value)
        first = self.first_read()
        if first is None:
            read = self._read_in_the_step()
            first = value if read is None else read
            self._first = weakref.ref(first.graph), first
        server_variables.watch(first, self.trainable)
        # A read after a write is another tensor, but the same variable for a tape.
        return value if value is first else _read_again(first, value)

    def _read_in_the_step(self) -> tf.Tensor | None:
        """Reads the variable outside of the traced loop, conditional or function, if there is one."""
        graph = current = tf.compat.v1.get_default_graph()
        while isinstance(outer := getattr(graph, "outer_graph", None), tf.Graph) and outer.building_function:
            graph = outer
        if graph is current:
            return None
        with graph.as_default(), tf.control_dependencies(None):
            return self._concatenated()

    def first_read(self) -> tf.Tensor | None:
        """Returns the first read in this graph, or in an enclosing graph."""
        return _of_this_graph(self._first)

    def __getitem__(self, key: Any) -> tf.Tensor:
        part = self.value()[key]
        part.assign = lambda value, name=None: self._assign_part(key, value)
        return part

    def _assign_part(self, key: Any, value: Any) -> Any:
        whole = self.value()
        positions = tf.reshape(tf.range(tf.size(whole)), whole.shape)[key]
        values = tf.broadcast_to(tf.convert_to_tensor(value, whole.dtype), tf.shape(positions))
        flat = tf.reshape(whole, [-1])
        flat = tf.tensor_scatter_nd_update(flat, tf.reshape(positions, [-1, 1]), tf.reshape(values, [-1]))
        return self.assign(tf.reshape(flat, whole.shape))

    def read_value(self) -> tf.Tensor:
        return tf.identity(self.value())

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        del dtype, name, as_ref
        return self.value()

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: Any, **kwargs: Any) -> Any:
        return self._write("assign", value, kwargs)

    def assign_add(self, delta: Any, **kwargs: Any) -> Any:
        return self._write("assign_add", delta, kwargs)

    def assign_sub(self, delta: Any, **kwargs: Any) -> Any:
        return self._write("assign_sub", delta, kwargs)

    def scatter_add(self, slices: tf.IndexedSlices, **kwargs: Any) -> Any:
        return self._scatter("scatter_add", slices, kwargs)

    def scatter_sub(self, slices: tf.IndexedSlices, **kwargs: Any) -> Any:
        return self._scatter("scatter_sub", slices, kwargs)

    def scatter_update(self, slices: tf.IndexedSlices, **kwargs: Any) -> Any:
        return self._scatter("scatter_update", slices, kwargs)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_add(self.value(), indices, updates, name))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_sub(self.value(), indices, updates, name))

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self.assign(tf.tensor_scatter_nd_update(self.value(), indices, updates, name))

    def _write(self, method: str, value: Any, kwargs: dict[str, Any]) -> Any:
        self._read = None
        parts = tf.split(
            tf.broadcast_to(tf.convert_to_tensor(value, self._shards.dtype), self._shards.shape), self._sizes
        )
        for shard, part in zip(self.variables, parts, strict=True):
            getattr(shard, method)(part, **kwargs)
        return self

    def _scatter(self, method: str, slices: tf.IndexedSlices, kwargs: dict[str, Any]) -> Any:
        self._read = None
        getattr(self._shards, method)(slices, **kwargs)
        return self

    def _concatenated(self) -> tf.Tensor:
        with server_variables.without_recording():
            return tf.concat([shard.read_value() for shard in self.variables], axis=0)


def _of_this_graph(read: tuple[weakref.ref, tf.Tensor] | None) -> tf.Tensor | None:
    """Returns the tensor of a read, if it is in the current graph or in an enclosing graph."""
    graph, value = (read[0](), read[1]) if read else (None, None)
    return value if any(each is graph for each in enclosing_graphs.enclosing()) else None


@tf.custom_gradient
def _read_again(first: tf.Tensor, value: tf.Tensor) -> Any:
    """Returns `value` with the gradients of `first`."""
    del first
    return tf.identity(value), lambda gradient: (gradient, None)


def partition(variable: Any, barrier: Callable[..., None]) -> Any:
    """Wraps a stock variable in a `PartitionedVariable`, if it is sharded."""
    if isinstance(variable, server_variables.ShardedVariable):
        return PartitionedVariable(variable, barrier)
    return variable
