# SPDX-License-Identifier: Apache-2.0
"""Data sets and iterators of workers within a `tf.function`: arguments, captures, and those created in it.

In the graph each is an int64, its number in the registry of `data/handle`. Their methods add operations that call the
chief's Python at each execution: `iter` begins a pass, `next` returns a handle (`worker_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import python_operation
from tfdist.compat.autograph_loops import LoopIterable, LoopIterator
from tfdist.data.handle import registry
from tfdist.engines.parameter_server import worker_batch
from tfdist.engines.parameter_server.worker_batch import Pass, WorkerBatch


class Optional:
    """A batch, or the end of the data; see `tf.experimental.Optional`.

    Args:
      has_value: a bool scalar.
      batch: the handle; invalid at the end of the data.
    """

    def __init__(self, has_value: tf.Tensor, batch: WorkerBatch):
        self._has_value = has_value
        self._batch = batch

    def has_value(self) -> tf.Tensor:
        """True if there is a batch."""
        return self._has_value

    def get_value(self) -> WorkerBatch:
        """Returns the handle of the batch."""
        if tf.executing_eagerly() and not bool(self._has_value):
            raise tf.errors.InvalidArgumentError(None, None, "The given optional does not have a value.")
        return self._batch


class GraphIterator(tf.experimental.ExtensionType, LoopIterator):
    """A pass over the data of workers, within a graph.

    Attributes:
      id: int64 scalar, the number of the pass.
      kind: number of the kind of its handles.
    """

    id: tf.Tensor
    kind: int

    def __iter__(self) -> Iterator[WorkerBatch]:
        return self

    def __next__(self) -> WorkerBatch:
        return self.get_next()

    def get_next(self) -> WorkerBatch:
        """Returns the handle of the next batch; the operation fails with `tf.errors.OutOfRangeError` at the end."""
        return self._handle(*_call(_next_handle, self.id, [tf.int64]))

    def get_next_as_optional(self) -> Optional:
        """Returns the handle of the next batch, or the end of the data."""
        has_value, handle = _call(_next_or_end, self.id, [tf.bool, tf.int64])
        return Optional(has_value, self._handle(handle))

    def _handle(self, handle: tf.Tensor) -> WorkerBatch:
        return registry.kind_of(self.kind).handle(handle)


class GraphDataset(tf.experimental.ExtensionType, LoopIterable):
    """A data set of workers, within a graph.

    Attributes:
      id: int64 scalar, the number of the data set.
      kind: number of the kind of its handles.
    """

    id: tf.Tensor
    kind: int

    def __iter__(self) -> GraphIterator:
        # Each call site keeps its last pass alive until it begins the next.
        begun: list[Pass] = []

        def begin(dataset_id: tf.Tensor) -> list[Any]:
            begun[:] = [iter(registry.find(dataset_id))]
            return [np.int64(begun[0].id)]

        return GraphIterator(*_call(begin, self.id, [tf.int64]), self.kind)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """See `tf.distribute.DistributedDataset`; AutoGraph makes a `for` loop of it."""
        iterator = iter(self)

        def step(_: tf.Tensor, handle: tf.Tensor, state: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
            state = reduce_func(state, registry.kind_of(self.kind).handle(handle))
            return *_next(iterator), state

        *_, state = tf.while_loop(
            lambda has_value, *_: has_value, step, (*_next(iterator), initial_state), parallel_iterations=1
        )
        return state


class HandleType(tf.types.experimental.TraceType):
    """Trace type of a data set or an iterator, passed by its number: one trace for all of the same kind.

    Args:
      make: makes the object for the traced function, from its number and the kind.
      kind: number of the kind of the handles.
    """

    def __init__(self, make: Callable[..., Any], kind: int):
        self._make = make
        self._kind = kind

    def is_subtype_of(self, other: Any) -> bool:
        """See `tf.types.experimental.TraceType`."""
        return self == other

    def most_specific_common_supertype(self, others: Sequence[Any]) -> HandleType | None:
        """See `tf.types.experimental.TraceType`."""
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        """See `tf.types.experimental.TraceType`."""
        return self._make(_NUMBER.placeholder_value(placeholder_context), self._kind)

    def to_tensors(self, value: Any) -> list[tf.Tensor]:
        """See `tf.types.experimental.TraceType`."""
        return [tf.convert_to_tensor(value.id, tf.int64)]

    def from_tensors(self, tensors: Iterator[tf.Tensor]) -> Any:
        """See `tf.types.experimental.TraceType`."""
        return self._make(next(tensors), self._kind)

    def flatten(self) -> list[Any]:
        """See `tf.types.experimental.TraceType`."""
        return [_NUMBER]

    def cast(self, value: Any, cast_context: Any) -> Any:
        """See `tf.types.experimental.TraceType`."""
        del cast_context
        return value

    def __hash__(self) -> int:
        return hash((self._make, self._kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandleType) and self._make is other._make and self._kind == other._kind


_NUMBER = tf.TensorSpec([], tf.int64)


def _next(iterator: GraphIterator) -> tuple[tf.Tensor, tf.Tensor]:
    found = iterator.get_next_as_optional()
    return found.has_value(), found._batch.content


def _call(function: Callable[..., list[Any]], number: tf.Tensor, dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    results = python_operation.call(function, [number], dtypes)
    for result in results:
        result.set_shape([])
    return results


def _next_handle(iterator_id: tf.Tensor) -> list[Any]:
    return [np.int64(worker_batch.find_pass(worker_batch.handle_of(int(iterator_id), 0)).next_for_graph())]


def _next_or_end(iterator_id: tf.Tensor) -> list[Any]:
    try:
        return [np.bool_(True), *_next_handle(iterator_id)]
    except (StopIteration, tf.errors.OutOfRangeError):
        return [np.bool_(False), np.int64(0)]
