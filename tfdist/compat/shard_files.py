# SPDX-License-Identifier: Apache-2.0
"""Saves variables in shards to `.keras` and `.weights.h5` files, and loads them, a block of rows at a time.

There is no public way: Keras turns each variable into an array before it writes it, reads each array whole, and makes
the file in memory where there seems to be enough. The files are the same as those of a model without shards: a data set
of HDF5 for each variable. All changes are permanent, and act on variables in shards alone; a large array that is read
for any other variable is read when it is assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.saving import saving_lib

from tfdist.compat import keras_variables, replacing
from tfdist.runtime import row_blocks

NEEDS = (
    "keras.src.saving.saving_lib:H5IOStore.__getitem__",
    "keras.src.saving.saving_lib:H5IOStore.__setitem__",
    "keras.src.saving.saving_lib:H5IOStore._h5_entry_group",
    "keras.src.saving.saving_lib:is_memory_sufficient(model)",
    "keras.src.saving.saving_lib:safe_get_h5_dataset",
    "keras:Optimizer.save_own_variables",
    "keras:Variable._value",
)


class Rows(Protocol):
    """A TensorFlow variable in shards."""

    shape: Any
    dtype: Any

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first to last - 1."""
        ...

    def write_rows(self, first: int, rows: np.ndarray) -> None:
        """Writes rows from `first` on."""
        ...


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
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.array(self), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._stored[rows]


def install(has_shards: Callable[[Any], bool]) -> None:
    """Changes how Keras saves and loads; `has_shards` returns True for TensorFlow variables in shards."""

    def rows_of(variable: Any) -> Rows | None:
        found = keras_variables.tf_variable(variable) if isinstance(variable, keras.Variable) else None
        return found if has_shards(found) else None

    replacing.once(saving_lib.H5IOStore, "__setitem__", _saving(rows_of))
    replacing.once(saving_lib.H5IOStore, "__getitem__", _reading)
    replacing.once(saving_lib, "is_memory_sufficient", _on_disk(rows_of))
    replacing.once(keras.Variable, "assign", _assigning(rows_of))
    replacing.once(keras.optimizers.Optimizer, "save_own_variables", _saving_slots(rows_of))


def _saving(rows_of: Callable[[Any], Rows | None]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def put(store: Any, key: str, value: Any) -> None:
            rows = rows_of(value)
            if rows is None or type(store) is not saving_lib.H5IOStore or rows.dtype.as_numpy_dtype not in _PLAIN:
                return original(store, key, value)
            # An empty array makes the group of the layer, as Keras does.
            original(store, key, np.zeros([0], np.float32))
            del store[key]
            shape, dtype = tuple(rows.shape), rows.dtype.as_numpy_dtype
            stored = store._h5_entry_group.create_dataset(key, shape=shape, dtype=dtype)
            for first, last in row_blocks.ranges(shape, np.dtype(dtype).itemsize):
                stored[first:last] = rows.read_rows(first, last)
            return None

        return put

    return wrap


_PLAIN = (np.float16, np.float32, np.float64)


def _reading(original: Any) -> Any:
    def get(store: Any, key: str) -> Any:
        if key in store:
            found = saving_lib.safe_get_h5_dataset(store._h5_entry_group, key)
            is_large = hasattr(found, "nbytes") and found.nbytes > row_blocks.BLOCK_BYTES and found.ndim == 2
            if is_large and "dtype" not in found.attrs:
                return StoredArray(found)
        return original(store, key)

    return get


def _on_disk(rows_of: Callable[[Any], Rows | None]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def is_memory_sufficient(model: Any) -> bool:
            return all(rows_of(variable) is None for variable in model.variables) and original(model)

        return is_memory_sufficient

    return wrap


def _assigning(rows_of: Callable[[Any], Rows | None]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def assign(variable: Any, value: Any) -> Any:
            rows = rows_of(variable) if isinstance(value, StoredArray) else None
            if rows is None or tuple(variable.shape) != value.shape:
                return original(variable, np.array(value) if isinstance(value, StoredArray) else value)
            for first, last in row_blocks.ranges(value.shape, np.dtype(value.dtype).itemsize):
                rows.write_rows(first, value[first:last])
            return value

        return assign

    return wrap


def _saving_slots(rows_of: Callable[[Any], Rows | None]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def save_own_variables(optimizer: Any, store: Any) -> None:
            if all(rows_of(variable) is None for variable in optimizer.variables):
                return original(optimizer, store)
            # As Keras does, but without an array of each.
            for index, variable in enumerate(optimizer.variables):
                store[str(index)] = variable
            return None

        return save_own_variables

    return wrap
