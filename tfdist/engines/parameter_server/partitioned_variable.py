# SPDX-License-Identifier: Apache-2.0
"""A variable sharded by rows over several parameter servers, with an interface that Keras 3 can use.

TensorFlow's `ShardedVariable` (of a strategy with a `variable_partitioner`) has no handle, so neither gradient tapes
nor Keras' optimizers support it. This class has three ways to be used in a step, on which the handle depends that
gradients are taken with respect to:

    rows are looked up    (embeddings)   each server gathers its rows; the handle is an empty tensor, the anchor, and
                                         the gradient has the rows of the step (`shard_rows`)
    the whole is read     (kernels)      the shards are concatenated on the worker; the handle is the first read,
                                         unless rows are looked up, too
    an update             (optimizers)   each shard is updated on its server (`shard_updates`): for that time the
                                         variable, and all of the same shards, stand for one shard, or for rows of it

Source of the layout: "div" partitioning of `tf.distribute.experimental.ParameterServerStrategy`: consecutive rows,
the first shards one row larger where the rows don't divide evenly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import loops, own_attributes, server_variables, sliced_restores
from tfdist.engines.parameter_server import linked_reads, shard_blocks, shard_rows
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable
from tfdist.engines.parameter_server.updated_part import Part, part_of

VARIABLE_VALUE = "VARIABLE_VALUE"


class PartitionedVariable(CoordinatedVariable):
    """Several shards with the interface of one variable.

    Args:
      shards: The stock `ShardedVariable`.
      barrier: See `CoordinatedVariable`.
      path: name of the variable in messages, with that of its layer.
    """

    def __init__(self, shards: server_variables.ShardedVariable, barrier: Callable[..., None], path: str = ""):
        self._exported = server_variables.exported(shards)
        super().__init__(_Whole(shards, path or shards.name), barrier)
        self.stored.watched = weakref.ref(self)

    @property
    def _v(self) -> Any:
        """The shards; in a function that is traced for a SavedModel, one variable of the same shape without a value."""
        return self._exported if server_variables.is_traced_for_export() else self._whole

    @_v.setter
    def _v(self, whole: _Whole) -> None:
        self._whole = whole

    @property
    def handle(self) -> tf.Tensor:
        """Tensor that gradients are taken with respect to: the step's first read, or the anchor of its lookups."""
        if server_variables.is_traced_for_export():
            return self._exported.handle
        return self.stored.eager_anchor if tf.executing_eagerly() else self.stored.handle_of_step()

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole, or of the part that is updated."""
        return self.stored.shape

    def _part(self) -> None:
        """Returns None: what is stored stands for its part by itself."""

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

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first to last - 1 on the chief, after all steps before."""
        self._barrier(writes=False)
        parts = [
            shard_blocks.read(shard, max(0, first - start), min(shard.shape[0], last - start)).numpy()
            for shard, start in self.stored.from_starts()
            if first < start + shard.shape[0] and start < last
        ]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def write_rows(self, first: int, rows: np.ndarray) -> None:
        """Writes rows from `first` on, after all steps before."""
        self._barrier(writes=True)
        for shard, start in self.stored.from_starts():
            low, high = max(first, start), min(first + len(rows), start + shard.shape[0])
            if low < high:
                shard_blocks.write(shard, low - start, high - start, rows[low - first : high - first])
                # Waits, because operations are sent ahead of those that run, and the server would hold several blocks.
                shard_blocks.read(shard, low - start, low - start + 1).numpy()

    def fill(self, rows: Callable[[int, int], tf.Tensor]) -> None:
        """Writes each block on its server: `rows(first, last)`, made there, is its value."""
        for shard, start in self.stored.from_starts():
            for first, last in shard_blocks.blocks(shard):
                with tf.device(shard.device):
                    shard_blocks.write(shard, first, last, rows(start + first, start + last))
        if tf.executing_eagerly():
            # Operations run behind; what comes next may look at the memory that is left, or at an error.
            for shard in self.variables:
                shard_blocks.read(shard, 0, 1).numpy()

    def _match_scaling(self, value: Any) -> None:
        """Returns None: the fused gradient descent is for single variables; each shard is assigned its rows."""

    def _handles(self) -> list[Any]:
        return [self.handle] if server_variables.is_traced_for_export() else [shard.handle for shard in self.variables]

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        raise NotImplementedError  # Makes checkpoints use the two methods below.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses float16 before anything is written: TensorFlow, loading a SavedModel, can't join slices of it."""
        if self.dtype == tf.float16:
            raise NotImplementedError(
                "a SavedModel takes no float16 variable in shards; use dtype='mixed_float16', or save a .keras file "
                "and export the model that keras.models.load_model makes of it outside of the strategy. "
                f"Received: {self._whole.path} in {len(self._whole.variables)} shards"
            )
        return super()._export_to_saved_model_graph(*args, **kwargs)

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        """Makes a SavedModel name one variable of the shape of the whole."""
        server_variables.describe(self._exported, self.variables[0].name.partition("/part_")[0], proto, options)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Returns blocks of the shards by their place in the whole; each is saved and restored by its server."""
        self._barrier(writes=False)
        full, rest = self.shape.as_list(), "".join(f":0,{size}" for size in self.shape.as_list()[1:])
        slices = {}
        for shard, start in self.stored.from_starts():
            for first, last in shard_blocks.blocks(shard):
                place = f"{' '.join(map(str, full))} {start + first},{last - first}{rest}"
                slices[place] = _block(shard, first, last)
        return {VARIABLE_VALUE: slices}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        """Assigns the whole, unless its blocks have been written as they were read."""
        self._barrier(writes=True)
        values = restored_tensors[VARIABLE_VALUE]
        if isinstance(values, dict) or sliced_restores.is_written(values):
            return self
        return self.assign(values)


def _block(shard: Any, first: int, last: int) -> sliced_restores.RowsOfShard:
    return sliced_restores.RowsOfShard(
        lambda: shard_blocks.shared(shard, first, last),
        lambda rows: shard_blocks.write(shard, first, last, rows),
        shard.dtype,
        shard.device,
    )


@dataclasses.dataclass
class _Step:
    """Tensors with respect to which a step's gradients are taken.

    Attributes:
      anchor: an empty tensor, where the step looks up rows: their gradient is a `tf.IndexedSlices`.
      first: the first read of the whole, where the step doesn't; None before it is made.
      is_looked_up: True if the step has looked up rows.
    """

    anchor: tf.Tensor
    first: tf.Tensor | None = None
    is_looked_up: bool = False


class _Whole:
    """`ShardedVariable` with the missing parts of a variable's interface."""

    def __init__(self, shards: server_variables.ShardedVariable, path: str):
        self._shards = shards
        self.path = path
        self.sizes: tuple[int, ...] = tuple(shard.shape.as_list()[0] or 0 for shard in shards.variables)
        self._read: tuple[weakref.ref, tf.Tensor] | None = None
        # The variable of these shards, which `GradientTape.watched_variables` returns.
        self.watched: Callable[[], Any] = lambda: None
        self.trainable = shards.variables[0].trainable
        self.device = shards.variables[0].device
        self.variables = list(shards.variables)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shards, name)

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole, or of the part that is updated."""
        part, whole = self._part(), self._shards.shape
        return whole if part is None else part.shape(whole)

    def _part(self) -> Part | None:
        return part_of(self.sizes)

    def value(self) -> tf.Tensor:
        """Returns the whole value; within one graph it is read once between two writes. In an update, the part."""
        part = self._part()
        if part is not None:
            return part.read(self.variables[part.index])
        if tf.executing_eagerly():
            self._watch_eagerly()
            return linked_reads.linked(self.eager_anchor, self._concatenated())
        value = _of_this_graph(self._read)
        if value is None:
            value = self._concatenated()
            self._read = (weakref.ref(value.graph), value)
        step = self._step()
        first = self._first_read(step, value)
        for handle in (step.anchor, first):
            server_variables.watch(handle, self.trainable)
        if value.graph is not first.graph:
            # The gradient of a loop can't add up for the anchor, which has no shape: both handles follow outside of it.
            with first.graph.as_default(), tf.control_dependencies(None):
                both = linked_reads.linked_twice(first, step.anchor, first)
            return linked_reads.linked(both, value)
        # A read after a write is another tensor, but the same variable for a tape.
        return linked_reads.linked_twice(first, step.anchor, value)

    @functools.cached_property
    def eager_anchor(self) -> tf.Tensor:
        """The tensor that gradients outside of graphs are taken with respect to; its value is never used."""
        with tf.init_scope(), tf.device("/device:CPU:0"):
            return tf.zeros([], self._shards.dtype)

    def _watch_eagerly(self) -> None:
        variable = self.watched()
        if variable is not None and self.trainable:
            server_variables.watch_variable(variable)

    def handle_of_step(self) -> tf.Tensor:
        """Returns the tensor that gradients of this graph, or of an enclosing one, are taken with respect to."""
        step = self._step()
        return step.anchor if step.is_looked_up else self._first_read(step, None)

    def _step(self) -> _Step:
        """Returns the handles in the graph of the step; they are made anew for each graph."""
        graph = _outermost_graph()
        # Kept by the graph: several threads may trace at the same time, and the threads of a step are several.
        steps = own_attributes.setdefault(graph, "_tfdist_steps", weakref.WeakKeyDictionary)
        if self not in steps:
            with graph.as_default(), tf.control_dependencies(None):
                # Of no static shape, because its gradient has that of the variable.
                anchor = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([], self._shards.dtype), shape=None)
            steps[self] = _Step(anchor)
        return steps[self]

    def _first_read(self, step: _Step, value: tf.Tensor | None) -> tf.Tensor:
        """Returns the first read of the step; `value` is one of this graph, if there is one."""
        if step.first is None:
            graph = step.anchor.graph
            if value is not None and value.graph is graph:
                step.first = value
            else:
                with graph.as_default(), tf.control_dependencies(None):
                    step.first = self._concatenated()
        return step.first

    def from_starts(self) -> Iterator[tuple[Any, int]]:
        """Yields each shard and its first row."""
        yield from zip(self.variables, (0, *itertools.accumulate(self.sizes[:-1])), strict=True)

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
        """Returns rows, each gathered on its server; in a conditional or a loop, rows of the whole."""
        if self._part() is not None:
            return tf.gather(self.value(), indices, name=name)
        if tf.executing_eagerly():
            self._watch_eagerly()
            return shard_rows.looked_up([self.eager_anchor], self.variables, indices, self.path)
        if loops.in_branch_or_loop():
            # A branch that isn't taken has a gradient of the handle's shape, and the anchor has none.
            return tf.gather(self.value(), indices, name=name)
        step = self._step()
        step.is_looked_up |= step.first is None
        handles = [step.anchor] if step.first is None else [step.anchor, step.first]
        for handle in handles:
            server_variables.watch(handle, self.trainable)
        return shard_rows.looked_up(handles, self.variables, indices, self.path)

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
        part = self._part()
        if part is not None:
            part.write(self.variables[part.index], method, value, kwargs)
            return self
        parts = tf.split(
            tf.broadcast_to(tf.convert_to_tensor(value, self._shards.dtype), self._shards.shape), list(self.sizes)
        )
        for shard, part in zip(self.variables, parts, strict=True):
            getattr(shard, method)(part, **kwargs)
        return self

    def _scatter(self, method: str, slices: tf.IndexedSlices, kwargs: dict[str, Any]) -> Any:
        self._read = None
        part = self._part()
        getattr(self._shards if part is None else self.variables[part.index], method)(slices, **kwargs)
        return self

    def _concatenated(self) -> tf.Tensor:
        with server_variables.without_recording():
            return tf.concat([shard.read_value() for shard in self.variables], axis=0)


def _of_this_graph(read: tuple[weakref.ref, tf.Tensor] | None) -> tf.Tensor | None:
    """Returns the tensor of a read, if it is in the current graph: a loop has to read anew each time."""
    graph, value = (read[0](), read[1]) if read else (None, None)
    return value if graph is not None and graph is tf.compat.v1.get_default_graph() else None


def _outermost_graph() -> Any:
    """Returns the graph of the step: outside of the traced loop, conditional or function, if there is one."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), tf.Graph) and outer.building_function:
        graph = outer
    return graph


def has_shards(variable: Any) -> bool:
    """Returns True for a `PartitionedVariable`."""
    return isinstance(variable, PartitionedVariable)


def partition(variable: Any, barrier: Callable[..., None], path: str = "") -> Any:
    """Wraps a stock variable in a `PartitionedVariable`, if it is sharded."""
    if isinstance(variable, server_variables.ShardedVariable):
        return PartitionedVariable(variable, barrier, path)
    return variable
