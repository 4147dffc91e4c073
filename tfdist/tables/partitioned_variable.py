# SPDX-License-Identifier: Apache-2.0
"""A variable sharded by rows over several parameter servers, with an interface that Keras 3 can use.

TensorFlow's `ShardedVariable` (of a strategy with a `variable_partitioner`) has no handle, so neither gradient tapes
nor Keras' optimizers support it. This class has three ways to be used in a step, on which the handle depends that
gradients are taken with respect to:

    rows are looked up    (embeddings)   each server gathers its rows; the handle is an empty tensor, the anchor, and
                                         the gradient has the rows of the step (`partitioned_variable`)
    the whole is read     (kernels)      the shards are concatenated on the worker; the handle is the first read,
                                         unless rows are looked up, too
    an update             (optimizers)   each shard is updated on its server (`partitioned_variable`): for that time the
                                         variable, and all of the same shards, stand for one shard, or for rows of it

Source of the layout: "div" partitioning of `tf.distribute.experimental.ParameterServerStrategy`: consecutive rows,
the first shards one row larger where the rows don't divide evenly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import sharding
from tfdist.compat.tensorflow import graphs
from tfdist.compat.tensorflow.variables import (
    ShardedVariable,
    describe_variable,
    exported_variable,
    is_single,
    is_traced_for_export,
    watch_handle,
    watch_variable,
    without_recording,
)
from tfdist.step.contribution import RowsByShard
from tfdist.tables.coordinated_variable import CoordinatedVariable, ShardRows, part_being_updated, updating

VARIABLE_VALUE = "VARIABLE_VALUE"


class PartitionedVariable(CoordinatedVariable, sharding.InShards):
    """Several shards with the interface of one variable.

    Args:
      shards: The stock `ShardedVariable`.
      barrier: See `CoordinatedVariable`.
      path: name of the variable in messages, with that of its layer.
    """

    def __init__(self, shards: ShardedVariable, barrier: Callable[..., None], path: str = ""):
        self._exported = exported_variable(shards)
        super().__init__(_Whole(shards, path or shards.name), barrier)
        self.stored.watched = weakref.ref(self)

    @property
    def _v(self) -> Any:
        """The shards; in a function that is traced for a SavedModel, one variable of the same shape without a value."""
        return self._exported if is_traced_for_export() else self._whole

    @_v.setter
    def _v(self, whole: _Whole) -> None:
        self._whole = whole

    @property
    def handle(self) -> tf.Tensor:
        """Tensor that gradients are taken with respect to: the step's first read, or the anchor of its lookups."""
        if is_traced_for_export():
            return self._exported.handle
        return self.stored.eager_anchor if tf.executing_eagerly() else self.stored.handle_of_step()

    def _part(self) -> None:
        """Returns None: what is stored stands for its part by itself, also in its shape."""

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
            read_rows(shard, max(0, first - start), min(shard.shape[0], last - start)).numpy()
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
                write_rows(shard, low - start, high - start, rows[low - first : high - first])
                # Waits, because operations are sent ahead of those that run, and the server would hold several blocks.
                read_rows(shard, low - start, low - start + 1).numpy()

    def fill(self, rows: Callable[[int, int], tf.Tensor]) -> None:
        """Writes each block on its server: `rows(first, last)`, made there, is its value."""
        for shard, start in self.stored.from_starts():
            for first, last in row_blocks_of(shard):
                with tf.device(shard.device):
                    write_rows(shard, first, last, rows(start + first, start + last))
        if tf.executing_eagerly():
            # Operations run behind; what comes next may look at the memory that is left, or at an error.
            for shard in self.variables:
                read_rows(shard, 0, 1).numpy()

    def _handles(self) -> list[Any]:
        return [self.handle] if is_traced_for_export() else [shard.handle for shard in self.variables]

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
        describe_variable(self._exported, self.variables[0].name.partition("/part_")[0], proto, options)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Returns blocks of the shards by their place in the whole; each is saved and restored by its server."""
        self._barrier(writes=False)
        full, rest = self.shape.as_list(), "".join(f":0,{size}" for size in self.shape.as_list()[1:])
        slices = {}
        for shard, start in self.stored.from_starts():
            for first, last in row_blocks_of(shard):
                place = f"{' '.join(map(str, full))} {start + first},{last - first}{rest}"
                slices[place] = _block(shard, first, last)
        return {VARIABLE_VALUE: slices}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        """Assigns the whole, unless its blocks have been written as they were read."""
        self._barrier(writes=True)
        values = restored_tensors[VARIABLE_VALUE]
        if isinstance(values, dict) or sharding.is_written(values):
            return self
        return self.assign(values)


def _block(shard: Any, first: int, last: int) -> sharding.RowsOfShard:
    return sharding.RowsOfShard(
        lambda: shared_rows(shard, first, last),
        lambda rows: write_rows(shard, first, last, rows),
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

    def __init__(self, shards: ShardedVariable, path: str):
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

    def _part(self) -> ShardRows | None:
        return part_being_updated(self.sizes)

    def value(self) -> tf.Tensor:
        """Returns the whole value; within one graph it is read once between two writes. In an update, the part."""
        part = self._part()
        if part is not None:
            return part.read(self.variables[part.index])
        if tf.executing_eagerly():
            self._watch_eagerly()
            return linked(self._concatenated(), self.eager_anchor)
        value = _of_this_graph(self._read)
        if value is None:
            value = self._concatenated()
            self._read = (weakref.ref(value.graph), value)
        step = self._step()
        first = self._first_read(step, value)
        for handle in (step.anchor, first):
            watch_handle(handle, self.trainable)
        if value.graph is not first.graph:
            # The gradient of a loop can't add up for the anchor, which has no shape: both handles follow outside of it.
            with first.graph.as_default(), tf.control_dependencies(None):
                both = linked(first, first, step.anchor)
            return linked(value, both)
        # A read after a write is another tensor, but the same variable for a tape.
        return linked(value, first, step.anchor)

    @functools.cached_property
    def eager_anchor(self) -> tf.Tensor:
        """The tensor that gradients outside of graphs are taken with respect to; its value is never used."""
        with tf.init_scope(), tf.device("/device:CPU:0"):
            return tf.zeros([], self._shards.dtype)

    def _watch_eagerly(self) -> None:
        variable = self.watched()
        if variable is not None and self.trainable:
            watch_variable(variable)

    def handle_of_step(self) -> tf.Tensor:
        """Returns the tensor that gradients of this graph, or of an enclosing one, are taken with respect to."""
        step = self._step()
        return step.anchor if step.is_looked_up else self._first_read(step, None)

    def _step(self) -> _Step:
        """Returns the handles in the graph of the step; they are made anew for each graph."""
        graph = _outermost_graph()
        # Kept by the graph: several threads may trace at the same time, and the threads of a step are several.
        steps = patching.setdefault(graph, "_tfdist_steps", weakref.WeakKeyDictionary)
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
            return look_up_rows([self.eager_anchor], self.variables, indices, self.path)
        if graphs.in_branch_or_loop():
            # A branch that isn't taken has a gradient of the handle's shape, and the anchor has none.
            return tf.gather(self.value(), indices, name=name)
        step = self._step()
        step.is_looked_up |= step.first is None
        handles = [step.anchor] if step.first is None else [step.anchor, step.first]
        for handle in handles:
            watch_handle(handle, self.trainable)
        return look_up_rows(handles, self.variables, indices, self.path)

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
        with without_recording():
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


def coordinate(variable: Any, barrier: Callable[..., None], path: str = "") -> Any:
    """Wraps a stock variable of the strategy; one of another kind is returned."""
    if isinstance(variable, ShardedVariable):
        return PartitionedVariable(variable, barrier, path)
    return CoordinatedVariable(variable.get(), barrier) if is_single(variable) else variable


# Reads of a variable in shards whose gradients lead to the tensors that stand for the variable.


@tf.custom_gradient
def linked(value: tf.Tensor, *handles: tf.Tensor) -> Any:
    """Returns `value`, with its gradient that of each of the handles, of which a step takes one."""
    return tf.identity(value), lambda gradient: (None, *[gradient] * len(handles))


# Reads and writes blocks of rows of a shard on its server, so that no process ever holds a second copy of the shard.
#
# A read of a variable whose rows are written singly copies all of it, and so does an assignment of a slice. Gathers,
# scatters, and reads that end the copying (`DisableCopyOnRead`) don't.


# A slice of the shard's tensor shares its memory if it begins at a multiple of so many bytes.
_ALIGNED_BYTES = 64


def row_blocks_of(shard: Any) -> Iterator[tuple[int, int]]:
    """Yields first row and end of each block of a shard."""
    return sharding.row_blocks(shard.shape.as_list(), shard.dtype.size, _ALIGNED_BYTES)


def read_rows(shard: Any, first: int, last: int) -> tf.Tensor:
    """Returns rows first to last - 1, gathered on the server."""
    with tf.device(shard.device):
        ids = tf.range(first, last, dtype=tf.int64)
        return tf.raw_ops.ResourceGather(resource=shard.handle, indices=ids, dtype=shard.dtype)


def write_rows(shard: Any, first: int, last: int, rows: Any) -> Any:
    """Writes rows first to last - 1 in place; returns the operation, None where operations run at once."""
    with tf.device(shard.device):
        ids = tf.range(first, last, dtype=tf.int64)
        updates = tf.convert_to_tensor(rows, shard.dtype)
        return tf.raw_ops.ResourceScatterUpdate(resource=shard.handle, indices=ids, updates=updates)


def shared_rows(shard: Any, first: int, last: int) -> tf.Tensor:
    """Returns rows first to last - 1 as a view of the shard's own memory, valid until the next write."""
    with tf.device(shard.device):
        end = tf.raw_ops.DisableCopyOnRead(resource=shard.handle)
        with tf.control_dependencies([end] if end is not None else []):
            value = tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype)
        value.set_shape(shard.shape)
        return value if (first, last) == (0, shard.shape[0]) else value[first:last]


# Lookup of rows of a variable in shards, and the gradient of what was looked up.
#
#     worker                                       parameter servers
#       ids, each once, by shard            -->      gather the rows
#       rows in the order of the ids        <--
#       gradients of equal ids added up              (later: an update of these rows, `partitioned_variable`)
#
# All servers are asked at the same time, and those of several tables as well: a step waits for one round trip.


def look_up_rows(handles: Sequence[tf.Tensor], shards: Sequence[Any], ids: Any, name: str) -> tf.Tensor:
    """Returns rows, with a gradient with respect to each handle that is a `tf.IndexedSlices` with each id once.

    Args:
      handles: stand for the variable.
      shards: the variables on the parameter servers, [rows of the shard, ...].
      ids: integers of any shape.
      name: of the variable, for the error of an id out of range.

    Returns:
      The rows, of shape ids.shape + shards[0].shape[1:].
    """
    ids = tf.convert_to_tensor(ids)

    @tf.custom_gradient
    def gather(*handles: tf.Tensor) -> Any:
        unique, positions = _unique(ids, shards, name)
        rows = _gather(shards, unique)

        def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
            flat = tf.reshape(upstream, [-1, *rows.shape[1:]])
            added = tf.math.unsorted_segment_sum(flat, positions, tf.size(unique))
            whole = tf.constant([sum(_rows_of_shards(shards)), *rows.shape[1:]], unique.dtype)
            return [tf.IndexedSlices(added, unique, whole)] * len(handles)

        of_each_id = tf.gather(rows, positions)
        return tf.reshape(of_each_id, tf.concat([tf.shape(ids), rows.shape[1:]], 0)), gradient

    found = gather(*handles)
    found.set_shape(ids.shape.concatenate(shards[0].shape[1:]))
    return found


def merge_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the values of equal indices."""
    if tf.is_symbolic_tensor(slices.indices) and slices.indices.op.type == "Identity":
        source = slices.indices.op.inputs[0]
        if source.op.type == "Unique" and source.value_index == 0:
            return slices
    found = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, found.idx, tf.size(found.y))
    return tf.IndexedSlices(values, found.y, slices.dense_shape)


def split_rows(slices: tf.IndexedSlices, sizes: Sequence[int]) -> list[tf.IndexedSlices]:
    """Returns the slices of each shard, each row once, with indices within the shard; `sizes` are the shards' rows."""
    if isinstance(slices, RowsByShard):
        return slices.map(merge_rows).pieces
    slices = merge_rows(slices)
    if len(sizes) == 1:
        return [slices]
    shard, within = _places(slices.indices, sizes)
    count = len(sizes)
    indices = tf.dynamic_partition(within, shard, count)
    values = tf.dynamic_partition(slices.values, shard, count)
    rest = slices.values.shape[1:]
    shapes = [tf.constant([size, *rest], within.dtype) for size in sizes]
    return [tf.IndexedSlices(*each) for each in zip(values, indices, shapes, strict=True)]


def _unique(ids: tf.Tensor, shards: Sequence[Any], name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the different ids, int64, and the place of each id among them, int32; raises if one is out of range."""
    found = tf.unique(tf.cast(tf.reshape(ids, [-1]), tf.int64))
    with tf.control_dependencies([_in_range(found.y, sum(_rows_of_shards(shards)), name)]):
        return tf.identity(found.y), found.idx


def _rows_of_shards(shards: Sequence[Any]) -> list[int]:
    return [shard.shape[0] for shard in shards]


def _places(ids: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the shard of each id, int32, and its row there."""
    ids = tf.cast(ids, tf.int64)
    firsts = tf.constant([0, *itertools.accumulate(sizes[:-1])], tf.int64)
    shard = tf.searchsorted(firsts, ids, side="right") - 1
    return shard, ids - tf.gather(firsts, shard)


def _gather(shards: Sequence[Any], ids: tf.Tensor) -> tf.Tensor:
    """Gathers the rows of different ids on the servers of their shards."""
    shard, within = _places(ids, _rows_of_shards(shards))
    asked = tf.dynamic_partition(within, shard, len(shards))
    places = tf.dynamic_partition(tf.range(tf.size(ids)), shard, len(shards))
    rows = []
    for variable, each in zip(shards, asked, strict=True):
        with tf.device(variable.device):
            rows.append(tf.raw_ops.ResourceGather(resource=variable.handle, indices=each, dtype=variable.dtype))
    found = tf.dynamic_stitch(places, rows)
    found.set_shape([None, *shards[0].shape[1:]])
    return found


def _in_range(ids: tf.Tensor, count: int, name: str) -> Any:
    """Checks the ids before they are sent; a server would name the row of its shard."""
    wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= count))
    # One string, because TensorFlow puts each tensor of the message in brackets of its own.
    received = tf.strings.reduce_join(tf.strings.as_string(wrong[:5]), separator=", ")
    allowed = f"[0, {count}), in Keras' layers and keras.ops in [{-count}, {count})"
    text = tf.strings.join([f"{name}: ids must be in {allowed}. Received: ", received])
    return tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [text], summarize=1)


# Updates of variables in shards, and of rows: on the parameter server, with what that server needs of the gradient.
#
# Keras updates a variable by a function of it, of its gradient and of slots of the same shape, element by element. So
# the function is called once for each shard, and meanwhile the variable and its slots stand for that shard; with
# `LazyRows` for the rows of it that have a gradient:
#
#     worker                                  parameter server of shard i
#       the gradient's rows of shard i  -->     optimizer.update_step(gradient, part of shard i), slots likewise
#
# Equal ids are added up first. The update of an optimizer that is not element by element is made of the whole, by the
# worker.


# Updates a variable: (variable, function, args, kwargs, group).
UpdateFunction = Callable[[Any, Callable[..., Any], tuple, dict[str, Any], bool], Any]


def update_by_shards(stock: UpdateFunction, is_lazy: bool, is_elementwise: Callable[[], bool]) -> UpdateFunction:
    """Returns a replacement of `strategy.extended._update`.

    Args:
      stock: the strategy's own.
      is_lazy: True if an update touches only the rows that have a gradient.
      is_elementwise: returns False within the update of an optimizer that needs the whole variable.
    """

    def update(variable: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], group: bool) -> Any:
        if not is_elementwise():
            return stock(variable, function, args, kwargs, group)
        if isinstance(variable, PartitionedVariable):
            shards, sizes = variable.variables, variable.stored.sizes
        elif (
            is_lazy
            and isinstance(variable, CoordinatedVariable)
            and any(isinstance(arg, tf.IndexedSlices) for arg in args)
        ):
            shards, sizes = [variable], (variable.shape[0],)
        else:
            return stock(variable, function, args, kwargs, group)
        for index, (shard, (rows, own)) in enumerate(
            zip(shards, _parts(args, variable.shape, sizes, is_lazy), strict=True)
        ):
            part = ShardRows(index, sizes, rows)

            def of_part(_: Any, *own: Any, part: ShardRows = part, **kwargs: Any) -> Any:
                with updating(part):
                    return function(variable, *own, **kwargs)

            stock(shard, of_part, tuple(own), kwargs, group)
        return None

    return update


def _parts(
    args: Sequence[Any], shape: tf.TensorShape, sizes: Sequence[int], is_lazy: bool
) -> list[tuple[tf.Tensor | None, list[Any]]]:
    """Returns for each shard the rows to update, None for all, and the arguments of the update."""
    by_shard: list[list[Any]] = [[] for _ in sizes]
    rows: list[tf.Tensor | None] = [None] * len(sizes)
    for arg in args:
        if isinstance(arg, tf.IndexedSlices):
            pieces: list[Any] = split_rows(arg, sizes)
            if is_lazy:
                rows = [piece.indices for piece in pieces]
                pieces = [piece.values for piece in pieces]
        elif isinstance(arg, tf.Tensor) and arg.shape.rank and arg.shape.is_compatible_with(shape):
            pieces = tf.split(arg, list(sizes))
        else:
            pieces = [arg] * len(sizes)
        for own, piece in zip(by_shard, pieces, strict=True):
            own.append(piece)
    return list(zip(rows, by_shard, strict=True))


# Sends the rows of a gradient of a variable in shards to the servers of the shards, each row to one server.
#
#     worker                                          parameter server of shard i
#       rows of the gradient, of equal ids added up
#       split by shard                         -->      adds up the rows of all contributions, and updates shard i
#
# A contribution has an entry for each variable while it is computed and when it is applied, and on the way one for each
# shard.


class RowPieces:
    """The entries that the gradients of a contribution have on the way.

    Args:
      gradients: of a contribution, dense or `tf.IndexedSlices`.
      targets: optimizer and variable of each.
    """

    def __init__(self, gradients: Sequence[Any], targets: Sequence[tuple[Any, Any]]) -> None:
        # Of each gradient; a single one where the variable isn't in shards, or has a dense gradient.
        self._shards: list[list[Any]] = []
        self.targets: list[tuple[Any, Any]] = []
        for gradient, target in zip(gradients, targets, strict=True):
            variable = target[1].value
            is_split = isinstance(variable, PartitionedVariable) and isinstance(gradient, tf.IndexedSlices)
            self._shards.append(list(variable.variables) if is_split else [variable])
            self.targets += [target] * len(self._shards[-1])
        self.devices = [shard.device for shards in self._shards for shard in shards]

    def split(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns an entry for each shard, from one for each variable."""
        entries: list[Any] = []
        for gradient, shards in zip(gradients, self._shards, strict=True):
            if len(shards) == 1:
                entries.append(gradient)
            else:
                pieces = split_rows(gradient, _rows_of_shards(shards))
                # Without the shape, which would be one more tensor to send.
                entries += [tf.IndexedSlices(piece.values, piece.indices) for piece in pieces]
        return entries

    def joined(self, entries: Sequence[Any]) -> list[Any]:
        """Returns an entry for each variable, from one for each shard."""
        left, gradients = iter(entries), []
        for shards in self._shards:
            pieces = [next(left) for _ in shards]
            is_whole = len(shards) == 1
            devices = [shard.device for shard in shards]
            gradients.append(pieces[0] if is_whole else RowsByShard(pieces, _rows_of_shards(shards), devices))
        return gradients
