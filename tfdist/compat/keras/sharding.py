# SPDX-License-Identifier: Apache-2.0
"""Variables in shards, as Keras and TensorFlow make, update, look up, save and restore them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.saving import saving_lib
from tensorflow.python.checkpoint import functional_saver, tensor_callable

from tfdist.compat import patching
from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import variables

NEEDS = (
    "keras:Variable._export_to_saved_model_graph(object_map), _initialize_with_initializer",
    "keras.src.backend.tensorflow.random:normal, truncated_normal, uniform",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._update",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._variable_count",
    "keras.src.backend.tensorflow.numpy:take(x, indices, axis)",
    "keras.src.saving.saving_lib:H5IOStore.__getitem__, __setitem__, _h5_entry_group",
    "keras.src.saving.saving_lib:is_memory_sufficient(model), safe_get_h5_dataset",
    "tensorflow.python.checkpoint.functional_saver:_single_shard_restore(file_prefix, shardable_tensors, options)",
    "tensorflow.python.checkpoint.sharding.sharding_util:ShardableTensor._tensor_save_spec",
    "tensorflow.python.checkpoint.tensor_callable:Callable",
)

# Bytes of the rows that are in memory besides the table, or shard, while it is read or written.
BLOCK_BYTES = 16 << 20
# Initializers that look at the shape alone.
_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# Initializers whose elements are one draw each; classes that derive from these and call anything else are not meant.
_DRAWN = tuple(
    getattr(keras.initializers, name).__call__
    for name in ("RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling")
)
# Numbers that one value of the counter gives, of float32; how far a group of numbers of each draw advances the counter.
_GROUP = 4
_ADVANCE = {"uniform": 1, "normal": 1, "truncated_normal": 256}
_DRAWS: dict[str, Callable[..., tf.Tensor]] = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_PHILOX = 1
# Shards above this size are drawn in parts.
LARGE_BYTES = 64 << 20
_lock = threading.RLock()


class TableRows:
    """The rows of a variable in shards as an array, of which slices are read from the servers.

    Args:
      table: the TensorFlow variable.
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self.shape, self.dtype = tuple(table.shape), np.dtype(table.dtype.as_numpy_dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._table.read_rows(rows.start, rows.stop)


class InShards:
    """Base class of TensorFlow variables in shards, with `read_rows(first, last)` and `write_rows(first, rows)`."""


def in_shards(variable: Any) -> Any:
    """The TensorFlow variable of a Keras variable in shards; None for anything else."""
    found = variables.tf_variable(variable) if isinstance(variable, keras.Variable) else None
    return found if isinstance(found, InShards) else None


# A variable may be made in a thread of its own (`graphs`).
_making: contextvars.ContextVar[Callable[[str], ShardInitial] | None] = contextvars.ContextVar("making", default=None)


class ShardInitial:
    """The initial value of a variable that may be in shards, in the form that TensorFlow asks for.

    Args:
      initializer: a Keras initializer.
      shape: of the whole.
      dtype: of the variable.
      path: name of the variable, with that of its layer.
    """

    def __init__(self, initializer: Any, shape: Sequence[int], dtype: str, path: str = "") -> None:
        self.shape = tuple(shape)
        self.path = path
        self._initializer = initializer
        self.dtype = dtype
        # True if the shards begin as zeros, and get their values from `rows`.
        self.is_postponed = False
        # The seed that is drawn for the first shard holds for all.
        self._seed: tf.Tensor | None = None

    def __call__(
        self, partition_shape: Sequence[int] | None = None, partition_offset: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Returns the whole, or a shard: rows partition_offset[0] to partition_offset[0] + partition_shape[0]."""
        if partition_shape is None or partition_offset is None:
            return self._initializer(self.shape, dtype=self.dtype)
        part = tuple(partition_shape)
        first = partition_offset[0]
        is_drawn = self.dtype == "float32" and type(self._initializer).__call__ in _DRAWN
        if not is_drawn and not isinstance(self._initializer, _CONSTANTS):
            return self._initializer(self.shape, dtype=self.dtype)[first : first + part[0]]
        if math.prod(part) * tf.as_dtype(self.dtype).size > LARGE_BYTES:
            # A draw takes three times its memory for a moment, a constant twice.
            self.is_postponed = True
            return tf.zeros(part, self.dtype)
        return self.rows(first, first + part[0])

    def rows(self, first: int, last: int) -> tf.Tensor:
        """Returns rows first to last - 1 of the whole."""
        part = (last - first, *self.shape[1:])
        if isinstance(self._initializer, _CONSTANTS):
            return self._initializer(part, dtype=self.dtype)
        with _lock, optimizers.patched_attributes([self._drawing(name, first, part) for name in _DRAWS]):
            return self._initializer(self.shape, dtype=self.dtype)

    def _drawing(self, name: str, first: int, part: tuple[int, ...]) -> tuple[Any, str, Any]:
        module: Any = backend.random

        def draw(shape: Any, *limits: Any, dtype: Any = None, seed: Any = None, **named: Any) -> tf.Tensor:
            del shape, dtype
            if self._seed is None:
                drawn = module.draw_seed(seed)
                # As Keras casts it.
                self._seed = drawn if drawn.dtype == tf.int32 else tf.cast(drawn % (tf.int32.max - 1), tf.int32)
            numbers = _numbers(name, self._seed, first * math.prod(part[1:]), part)
            low, high = *limits, *named.values()
            return numbers * (high - low) + low if name == "uniform" else numbers * high + low

        return module, name, draw


def know_shards() -> None:
    """Makes Keras and TensorFlow initialize, look up, save and restore variables in shards part by part, for good."""
    patching.once(keras.Variable, "_initialize_with_initializer", _noting)
    keras.Variable.sparse_read = property(_sparse_read)
    patching.once(backend.numpy, "take", _looking_up)
    patching.once(saving_lib.H5IOStore, "__setitem__", _saving)
    patching.once(saving_lib.H5IOStore, "__getitem__", _reading)
    patching.once(saving_lib, "is_memory_sufficient", _on_disk)
    patching.once(keras.optimizers.Optimizer, "save_own_variables", _saving_slots)
    patching.once(functional_saver, "_single_shard_restore", _one_by_one)


def present_initializer(dtype: Any) -> ShardInitial | None:
    """The initial value of the Keras variable that is being made, of this dtype."""
    make = _making.get()
    return make and make(dtype)


def _noting(original: Any, variable: Any, initializer: Any) -> None:
    before = _making.set(functools.partial(ShardInitial, initializer, variable.shape, path=variable.path))
    try:
        original(variable, initializer)
    finally:
        _making.reset(before)
    if in_shards(variable) is not None:
        patching.put_method(variable, "assign", _assign)
        patching.put_method(variable, "_export_to_saved_model_graph", _export)


def _numbers(name: str, seed: tf.Tensor, first: int, part: tuple[int, ...]) -> tf.Tensor:
    """Returns the numbers first to first + prod(part) of a draw, float32, in the shape `part`."""
    group, begun = divmod(first, _GROUP)
    found = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    # 128 bits in two words; the low one does not overflow, because it begins below 2**33.
    counter = found.counter + tf.constant([group * _ADVANCE[name], 0], tf.uint64)
    count = math.prod(part)
    numbers = _DRAWS[name](shape=[begun + count], key=found.key, counter=counter, alg=_PHILOX, dtype=tf.float32)
    return tf.reshape(numbers[begun:], part)


# Makes a parameter-server strategy update variables in shards shard by shard, and put their slots beside them.
#
# There is no public way: `strategy.extended` updates a variable whole, can't be replaced, and counts the variables that
# it has made to find the next one's parameter server. The replacement of `_update` lives and ends with the strategy.
# The one of Keras' optimizers is permanent, and only notes which optimizer makes an update.


# Optimizers whose update of an element needs no other element of the variable.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.RMSprop,
    keras.optimizers.Lion,
)


class _Updating(threading.local):
    is_elementwise = True


_updating = _Updating()


def replace_update(strategy: Any, wrap: Callable[[Any, Callable[[], bool]], Any]) -> None:
    """Replaces how a strategy updates a variable.

    Args:
      strategy: a `tf.distribute.ParameterServerStrategy`.
      wrap: called with the strategy's own `_update`, and with a function that returns False within the update of an
        optimizer that needs the whole variable; returns what takes its place.
    """
    patching.once(keras.optimizers.Optimizer, optimizers.UPDATE, _noting_update)
    strategy.extended._update = wrap(strategy.extended._update, lambda: _updating.is_elementwise)


def beside_shards(strategy: Any, first: Any) -> contextlib.AbstractContextManager:
    """Context in which the shards of a new variable are put on the servers of another variable's shards.

    Args:
      strategy: a `tf.distribute.ParameterServerStrategy`.
      first: the first shard of the other variable.
    """
    server = tf.DeviceSpec.from_string(first.device).task
    return optimizers.patched_attributes([(strategy.extended, "_variable_count", server)])


def _noting_update(original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = _updating.is_elementwise
    _updating.is_elementwise = any(type(optimizer).update_step is each.update_step for each in _ELEMENTWISE)
    try:
        return original(optimizer, *args, **kwargs)
    finally:
        _updating.is_elementwise = before


# Looks up rows of a Keras variable in shards on the servers that have them.
#
# There is no public way. `tf.gather` calls `sparse_read` of a variable, if it has one; a Keras variable has none, and
# so is read whole. `keras.ops.take`, which `keras.layers.Embedding` calls, reads it besides for its number of rows:
# TensorFlow makes that read although nothing depends on it, and a read copies a variable whose rows have ever been
# written. So Keras variables in shards get `sparse_read`, and `keras.ops.take` calls it. Both changes are permanent,
# and ones of variables in shards alone.


def _sparse_read(variable: Any) -> Callable[..., Any]:
    table = in_shards(variable)
    if table is None:
        raise AttributeError("sparse_read")
    return table.sparse_read


def _looking_up(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    table = in_shards(x) if axis == 0 else None
    return original(x, indices, axis) if table is None else _looked_up(table, indices)


def _looked_up(table: Any, indices: Any) -> Any:
    """Returns the result of Keras' `take` for the first axis: negative indices count from the end."""
    count = table.shape[0]

    def counted(values: tf.Tensor) -> tf.Tensor:
        # Ids that are out of range stay as they are, for the error's text.
        from_end = values + tf.cast(count, values.dtype)
        return tf.where((values < 0) & (from_end >= 0), from_end, values)

    if isinstance(indices, tf.SparseTensor):
        ids = tf.sparse.expand_dims(tf.SparseTensor(indices.indices, counted(indices.values), indices.dense_shape), -1)
        rows = tf.nn.safe_embedding_lookup_sparse(table, ids, default_id=0)
        rows.set_shape(indices.shape + rows.shape[len(indices.shape) :])
        return rows
    if isinstance(indices, tf.RaggedTensor):
        return tf.ragged.map_flat_values(lambda values: table.sparse_read(counted(values)), indices)
    return table.sparse_read(counted(tf.convert_to_tensor(indices)))


# Saves variables in shards to `.keras` and `.weights.h5` files, and loads them, a block of rows at a time.
#
# There is no public way: Keras turns each variable into an array before it writes it, and reads each array whole. It
# makes the file in memory where there seems to be enough. The files are the same as those of a model without shards: a
# data set of HDF5 for each variable. All changes are permanent, and act on variables in shards alone. A large matrix
# stays a data set of the file until it is assigned, to any variable.


def _saving(original: Any, store: Any, key: str, value: Any) -> None:
    rows = in_shards(value)
    if rows is None or type(store) is not saving_lib.H5IOStore or rows.dtype.as_numpy_dtype not in _PLAIN:
        return original(store, key, value)
    # An empty array makes the group of the layer, as Keras does.
    original(store, key, np.zeros([0], np.float32))
    del store[key]
    table = TableRows(rows)
    stored = store._h5_entry_group.create_dataset(key, shape=table.shape, dtype=table.dtype)
    for first, last in row_blocks(table.shape, table.dtype.itemsize):
        stored[first:last] = table[first:last]
    return None


_PLAIN = (np.float16, np.float32, np.float64)


class StoredArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A data set of a file, which is read when it is needed as an array: by arithmetic, or any attribute of one."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.shape = tuple(stored.shape)
        self.dtype = stored.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads all of it."""
        del copy  # A copy each time.
        return np.array(self._stored, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.array(each) if isinstance(each, StoredArray) else each for each in inputs]
        if any(each is self for each in options.get("out", ())):
            del options["out"]  # As of `array += ...`: the file stays as it is.
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.array(self), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._stored[rows]


def _reading(original: Any, store: Any, key: str) -> Any:
    found = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key) if key in store else None
    is_large = found is not None and found.ndim == 2 and found.nbytes > BLOCK_BYTES
    return StoredArray(found) if is_large and "dtype" not in found.attrs else original(store, key)


def _on_disk(original: Any, model: Any) -> bool:
    return all(in_shards(variable) is None for variable in model.variables) and original(model)


def _assign(variable: Any, value: Any) -> Any:
    if not isinstance(value, StoredArray | np.memmap) or tuple(variable.shape) != value.shape:
        return type(variable).assign(variable, np.array(value) if isinstance(value, StoredArray) else value)
    rows = variables.tf_variable(variable)
    for first, last in row_blocks(value.shape, value.dtype.itemsize):
        rows.write_rows(first, value[first:last])
    return value


def _export(variable: Any, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any) -> Any:
    # Keras (3.15) maps each of its variables to a second one of the exported graph, with the same value. It also tracks
    # the `tf.Variable`s that the endpoints read. It does not find variables in shards. So a session, such as TensorFlow
    # Serving's, would restore the second alone, and look rows up in a variable without a value.
    stored = variables.tf_variable(variable)
    resources = stored._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
    object_map[variable] = object_map[stored]
    return resources


def _saving_slots(original: Any, optimizer: Any, store: Any) -> None:
    if all(in_shards(variable) is None for variable in optimizer.variables):
        return original(optimizer, store)
    # As Keras does, but without an array of each.
    for index, variable in enumerate(optimizer.variables):
        store[str(index)] = variable
    return None


# Saves and restores a variable in slices, each of which is read from the checkpoint when the one before is written.
#
# `Trackable._serialize_to_tensors` may return a dictionary of slices in place of a tensor, and TensorFlow saves each
# slice on the device that has it. Its restore (TensorFlow 2.21) reads all slices of a task in one operation, before any
# assignment: the task would hold its part of a table twice. There is no other way to restore by parts, because Keras'
# variables define these methods. The change is permanent, and one of slices of the class `RowsOfShard` only.


class RowsOfShard(tensor_callable.Callable):
    """A slice of a variable that is read when it is saved, and written as soon as it has been restored.

    Args:
      read: returns the tensor to save.
      write: writes the restored tensor; returns the operation.
      dtype: of the tensor.
      device: that has it.
    """

    def __init__(self, read: Callable[[], tf.Tensor], write: Callable[[tf.Tensor], Any], dtype: Any, device: str):
        super().__init__(read, dtype=dtype, device=device)
        self.write = write


def is_written(tensor: Any) -> bool:
    """Returns True for what a restored slice of `RowsOfShard` is replaced by."""
    return tensor.shape == (0,)


def _one_by_one(original: Any, file_prefix: Any, shardable_tensors: Any, options: Any = None) -> Any:
    rows = [each for each in shardable_tensors if isinstance(each._tensor_save_spec, RowsOfShard)]
    others = [each for each in shardable_tensors if not isinstance(each._tensor_save_spec, RowsOfShard)]
    found = original(file_prefix, others, options) if others else {}
    before: list[Any] = []
    for each in rows:
        with tf.control_dependencies(before):
            [(key, slices)] = original(file_prefix, [each], options).items()
            # `None` where operations run at once.
            before = [done] if (done := each._tensor_save_spec.write(slices[each.slice_spec])) is not None else []
        with tf.control_dependencies(before):
            found.setdefault(key, {})[each.slice_spec] = tf.zeros([0], each.dtype)
    return found


def row_blocks(shape: Sequence[int], item_bytes: int, aligned_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """Yields first row and end of each block of an array.

    Args:
      shape: of the array.
      item_bytes: bytes of an element.
      aligned_bytes: each block begins at a multiple of so many bytes.
    """
    row_bytes = max(1, math.prod(shape[1:]) * item_bytes)
    multiple = aligned_bytes // math.gcd(aligned_bytes, row_bytes)
    size = max(multiple, BLOCK_BYTES // row_bytes // multiple * multiple)
    yield from ((first, min(shape[0], first + size)) for first in range(0, shape[0], size))
