# SPDX-License-Identifier: Apache-2.0
"""Variables on the parameter servers with ordered access by the chief, and atomic increments by the workers.

The stock variable has two defects under asynchronous workers:

* The chief does not know that steps it scheduled are still running. A metric that is read, or reset, in between counts
  a part of them. Here, reading or writing a variable on the chief first waits for every step scheduled before
  (`barrier`).
* Keras' `Variable.assign_add(x)` is `assign(self + x)`: read, add, write. If two workers do so at once, one addition is
  lost. Here an assignment becomes one atomic addition if its value adds to (or subtracts from) a read of the same
  variable, with no write between. With a single worker the result is the same.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat.tensorflow import graphs, replicas, variables

_SCATTERS = ("add", "sub", "update", "max", "min", "mul", "div", "nd_add", "nd_sub", "nd_update")
# Methods that write, which need no more than that the chief waits, and that the writes of a step are counted.
_WRITES = ("assign_add", "assign_sub", "batch_scatter_update", *(f"scatter_{kind}" for kind in _SCATTERS))


class CoordinatedVariable(variables.ServerVariable):
    """A variable on a parameter server: ordered on the chief, atomic on the workers.

    Args:
      variable: The `tf.Variable` that lives on the parameter server.
      barrier: Called before the chief touches the value; `barrier(writes=...)` returns once all scheduled steps are
        done.
    """

    def __init__(self, variable: tf.Variable, barrier: Callable[..., None]):
        super().__init__(variable)
        self._barrier = barrier
        self._writes = 0
        self._reads: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Reads in the graph of this tensor return it until the next write; None for reads of the variable.
        self.ahead: tf.Tensor | None = None
        self._for_data: tf.Variable | None = None

    # Reads.

    def _read(self, read: Callable[..., Any], *args: Any, is_whole: bool = False, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            self._barrier(writes=False)
            part = self._part() if is_whole else None
            return part.read(self.stored) if part else read(*args, **kwargs)
        if graphs.in_dataset_function():
            return getattr(self._copy_for_data(), read.__name__)(*args, **kwargs)
        part = self._part() if is_whole else None
        value = part.read(self.stored) if part else self._as_read_ahead() if is_whole else None
        if value is None:
            value = read(*args, **kwargs)
        # An addition to the variable begins with the whole variable, not with a part or a permutation of it.
        if is_whole and tf.is_tensor(value) and hasattr(value, "graph"):
            self._reads.setdefault(value.graph, {})[value.op.name] = self._state_in(value.graph)
        return value

    def read_value(self) -> tf.Tensor:
        """See `tf.Variable.read_value`."""
        return self._read(super().read_value, is_whole=True)

    def value(self) -> tf.Tensor:
        """See `tf.Variable.value`."""
        return self._read(super().value, is_whole=True)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable.sparse_read`."""
        return self._read(super().sparse_read, indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable.gather_nd`."""
        return self._read(self.stored.gather_nd, indices, name=name)

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        is_whole = dtype in (None, self.dtype) and not as_ref
        return self._read(super()._dense_var_to_tensor, is_whole=is_whole, dtype=dtype, name=name, as_ref=as_ref)

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the variable; in an update of rows, that of the rows."""
        part = self._part()
        return self.stored.shape if part is None else part.shape(self.stored.shape)

    def _part(self) -> ShardRows | None:
        """Returns the rows that the variable stands for in an update, or None."""
        return part_being_updated(tuple(self.stored.shape[:1]))

    def _copy_for_data(self) -> tf.Variable:
        """Makes a variable on the chief with the current value, when a data set first uses this variable.

        A function of a data set can't read a variable on another machine, and the chief prefetches ahead of the steps.
        """
        if self._for_data is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                value = self.read_value()
                name = self.name.split(":")[0].split("/")[-1]
                self._for_data = variables.variable_of_process(tf.identity(value), name)
        return self._for_data

    def _as_read_ahead(self) -> tf.Tensor | None:
        value = self.ahead
        if value is None or value.graph is not tf.compat.v1.get_default_graph():
            return None
        # In an update the variable is local, and the value that was read ahead is on the worker.
        if tf.distribute.get_replica_context() is None or replicas.is_updating():
            return None
        if self._num_writes(value.graph):
            return None
        with variables.without_recording():
            copy = tf.identity(value)
        variables.record_read(self.stored, copy)
        return copy

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        self._barrier(writes=False)
        return super()._gather_saveables_for_checkpoint()

    def _serialize_to_tensors(self) -> dict[str, Any]:
        self._barrier(writes=False)
        return self.serialized()

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        self._barrier(writes=True)
        return self.restored(restored_tensors)

    # Writes.

    def assign(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> Any:
        """See `tf.Variable.assign`; adding to the variable itself becomes atomic."""
        is_apart = tf.executing_eagerly() or graphs.in_dataset_function()
        delta = None if is_apart else self._match_addition(value)
        if delta is None:
            return self._write(super().assign, value, use_locking=use_locking, name=name, read_value=read_value)
        if _thread.postponed is not None and _thread.postponed.take(self, delta):
            return value
        operation = self.stored.assign_add if delta.sign > 0 else self.stored.assign_sub
        value = self._nearby(delta.value)
        return self._write(operation, value, use_locking=use_locking, name=name, read_value=read_value)

    def __getitem__(self, key: Any) -> tf.Tensor:
        """See `tf.Variable`; the result has `assign`."""
        part = super().__getitem__(key)
        part.assign = lambda value, name=None: self._write(lambda: self.stored[key].assign(value, name))
        return part

    def _write(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            self._barrier(writes=True)
        elif graphs.in_dataset_function():
            return getattr(self._copy_for_data(), write.__name__)(*args, **kwargs)
        else:
            if _thread.postponed is not None:
                _thread.postponed.add(self)
            for watcher in _thread.watchers:
                watcher(self)
        self._writes += 1
        part = self._part()
        if part is not None and write.__name__ in ("assign", "assign_add", "assign_sub"):
            part.write(self.stored, write.__name__, args[0], {})
            return self
        return write(*args, **kwargs)

    def _state_in(self, graph: Any) -> tuple[int, int]:
        """Returns a state that changes with each write, in a branch that is still traced, or in a called function."""
        return self._writes, self._num_writes(graph)

    def _num_writes(self, graph: Any) -> int:
        """Counts the operations of `graph` that write the variable, calls of functions included."""
        with graph.as_default():
            handles = [tf.convert_to_tensor(handle) for handle in self._handles()]
        return sum(variables.is_written_by(handle, each) for handle in handles for each in handle.consumers())

    def _handles(self) -> list[Any]:
        return [self.stored.handle]

    # Recognising `assign(self + x)`.

    def _match_addition(self, value: Any) -> _Addition | None:
        if not tf.is_tensor(value) or not hasattr(value, "op"):
            return None
        while value.op.type == "Identity":
            value = value.op.inputs[0]
        operation = value.op
        if operation.type in ("AddV2", "Add"):
            for read, added in (operation.inputs, operation.inputs[::-1]):
                if self._is_fresh_read(read):
                    return _Addition(self._like_self(added), 1)
        if operation.type == "Sub" and self._is_fresh_read(operation.inputs[0]):
            return _Addition(self._like_self(operation.inputs[1]), -1)
        return None

    def _is_fresh_read(self, tensor: tf.Tensor) -> bool:
        """Returns True if `tensor` is a read of this variable after its last write."""
        reads = self._reads.get(tensor.graph, {})
        while True:
            if tensor.op.name in reads:
                return reads[tensor.op.name] == self._state_in(tensor.graph)
            if tensor.op.type != "Identity":
                return False
            tensor = tensor.op.inputs[0]

    def _nearby(self, delta: tf.Tensor) -> tf.Tensor:
        """Places a counter's constant increment on the counter's device, so that no step sends it."""
        constant = tf.get_static_value(delta) if self.shape.rank == 0 else None
        if constant is None:
            return delta
        with tf.device(self.device):
            return tf.constant(constant, delta.dtype)

    def _like_self(self, delta: tf.Tensor) -> tf.Tensor:
        return delta if delta.shape == self.shape else tf.broadcast_to(delta, self.shape)


@contextlib.contextmanager
def watched(watcher: Callable[[CoordinatedVariable], None]) -> Iterator[None]:
    """Context in which `watcher` is called before each write that this thread traces."""
    before, _thread.watchers = _thread.watchers, (*_thread.watchers, watcher)
    try:
        yield
    finally:
        _thread.watchers = before


@contextlib.contextmanager
def postponed_additions(variables: Sequence[Any]) -> Iterator[None]:
    """Context in which what this thread's graph adds to variables is summed up, and added once at the end.

    Args:
      variables: Keras variables, of which nothing is read in between but to add to them, such as those of metrics.
    """
    values = {id(variable.value): variable.value for variable in variables}
    _thread.postponed = postponed = _Postponed(
        [value for value in values.values() if isinstance(value, CoordinatedVariable)]
    )
    try:
        yield
        for variable in postponed.variables:
            postponed.add(variable)
    finally:
        _thread.postponed = None


class _Postponed:
    """The additions to variables in a graph that are not in it yet."""

    def __init__(self, variables: Sequence[CoordinatedVariable]) -> None:
        self.variables = variables
        self._graph = tf.compat.v1.get_default_graph()
        self._deltas: dict[int, list[tf.Tensor]] = {id(variable): [] for variable in variables}

    def take(self, variable: CoordinatedVariable, addition: _Addition) -> bool:
        """Keeps an addition; returns False if it has to be made now, as in the branch of a conditional."""
        if id(variable) not in self._deltas or tf.compat.v1.get_default_graph() is not self._graph:
            return False
        self._deltas[id(variable)].append(addition.value if addition.sign > 0 else -addition.value)
        return True

    def add(self, variable: CoordinatedVariable) -> None:
        """Makes the additions to a variable, if there are any."""
        deltas = self._deltas.get(id(variable))
        if deltas:
            self._deltas[id(variable)] = []
            with self._graph.as_default():
                variable.assign_add(tf.add_n(deltas), read_value=False)


class _Thread(threading.local):
    """State of the variables in a thread: who is told of writes, what is postponed, and the part updated."""

    watchers: tuple[Callable[[CoordinatedVariable], None], ...] = ()
    postponed: _Postponed | None = None
    part: ShardRows | None = None


_thread = _Thread()


def _writing(name: str) -> Callable[..., Any]:
    def write(self: CoordinatedVariable, *args: Any, **kwargs: Any) -> Any:
        return self._write(getattr(self.stored, name), *args, **kwargs)

    write.__name__ = name
    write.__doc__ = f"See `tf.Variable.{name}`."
    return write


for _name in _WRITES:
    setattr(CoordinatedVariable, _name, _writing(_name))


class _Addition(NamedTuple):
    """Addition (`sign` 1) of `value` to the variable, or subtraction (-1)."""

    value: tf.Tensor
    sign: int


# The part of a variable that an update is made of: a shard, some rows, or rows of a shard.
#
# An optimizer's update of one variable also reads and writes slots of the same shape. Within `updating`, the variable
# and all others with the same shards stand for one part of them, so that Keras' formula is used unchanged.


# Write of rows for each write of the whole.
_SCATTER_OF = {"assign": "scatter_update", "assign_add": "scatter_add", "assign_sub": "scatter_sub"}


class ShardRows(NamedTuple):
    """A part of the variables that have the same shards.

    Attributes:
      index: of the shard.
      sizes: rows of each shard; one number for a variable that is not in shards.
      rows: int64 [rows], indices within the shard; None for all of it.
    """

    index: int
    sizes: tuple[int, ...]
    rows: tf.Tensor | None

    def read(self, shard: Any) -> tf.Tensor:
        """Returns the part's value; `shard` is the variable at `index`."""
        return shard.read_value() if self.rows is None else shard.sparse_read(self.rows)

    def write(self, shard: Any, method: str, value: Any, kwargs: dict[str, Any]) -> None:
        """Writes the part by `assign`, `assign_add` or `assign_sub`."""
        if self.rows is None:
            getattr(shard, method)(value, **kwargs)
        else:
            slices = tf.IndexedSlices(tf.convert_to_tensor(value, shard.dtype), self.rows)
            getattr(shard, _SCATTER_OF[method])(slices)

    def shape(self, whole: tf.TensorShape) -> tf.TensorShape:
        """Returns the part's static shape."""
        return tf.TensorShape([self.sizes[self.index] if self.rows is None else None, *whole[1:]])


@contextlib.contextmanager
def updating(part: ShardRows) -> Iterator[None]:
    """Context in which variables with the same shards stand for their part, in this thread."""
    before, _thread.part = _thread.part, part
    try:
        yield
    finally:
        _thread.part = before


def part_being_updated(sizes: tuple[int, ...]) -> ShardRows | None:
    """Returns the part that variables with these shards stand for, or None for the whole."""
    part = _thread.part
    return part if part is not None and part.sizes == sizes else None
