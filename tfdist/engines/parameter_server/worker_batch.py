# SPDX-License-Identifier: Apache-2.0
"""Handles of batches in the chief's loop, and the transfer of a batch to the chief.

`next(iterator)` returns a **handle** (`WorkerBatch`) of each batch. It has the pass and the position; in a graph it is
one int64. Unpacking it returns handles of the parts of the batch. Inside a function given to `strategy.run`, a handle
is replaced by the batch, or by the part.

The **owner** of a batch is the process that reads it:

* A batch is not read before its handle is used.
* The first `strategy.run` with the handle, or with parts of it, reads the batch: on the worker of the step, from this
  worker's share, or on the chief, if the chief feeds this pass. The worker keeps the batch for the lifetime of the
  handle.
* If the chief needs the value (`numpy()`, a TensorFlow operation, `print`, `strategy.gather`,
  `experimental_local_results`), the batch is *materialised*: fetched from its worker, or read if no worker has it. If
  this is the first batch of the pass, the chief feeds the whole pass from then on.
* A second `strategy.run` with the same handle may run on another worker, and a step with several batches needs the
  batches of several workers. Such batches are materialised, and sent with the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.compat import own_attributes, python_operation

# A handle has the number of its pass, and in the lower bits the number of the batch. Batch 0 is "the next batch".
_POSITION_BITS = 40

_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
# By the description of a part: spec of the whole batch, spec of the part, number of leaves before the part.
_layouts: dict[str, tuple[Any, Any, int]] = {}


class BatchOfPass(Protocol):
    """The part of a batch that a handle needs."""

    def values(self) -> list[Any]:
        """Returns the batch on the chief, flat."""
        ...


class Pass(Protocol):
    """The part of a pass over the data that its handles need.

    Attributes:
      id: the number of the pass in this program.
    """

    id: int

    def batch(self, number: int) -> BatchOfPass:
        """Returns the batch of this number."""
        ...

    def next_for_graph(self) -> int:
        """Returns the int64 of a handle of the next batch, for a handle made within a graph."""
        ...


class WorkerBatch(tf.experimental.ExtensionType, tf.distribute.DistributedValues):
    """Handle of a batch on the workers, or of a part of it.

    It stands for the batch in `strategy.run(fn, args=(batch,))`; inside `fn` it is the batch itself. It can be unpacked
    like the batch, and is converted to the batch's value where a tensor is needed.

    Attributes:
      handle: int64 scalar, the numbers of pass and batch.
      structure: description of the part; a `tf.function` is traced for each structure.
    """

    handle: tf.Tensor
    structure: str

    # ExtensionType lists what a subclass adds as fields, unless it is a method.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    class Spec:
        """The type spec that TensorFlow derives, with a faster version of a method that each step calls."""

        def to_tensors(self, value: WorkerBatch) -> list[tf.Tensor]:
            """See `tf.types.experimental.TraceType`: the result of the inherited method, in a twentieth of its time."""
            return [value.handle]

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batch, or of the part."""
        return _layouts[self.structure][1]

    @property
    def whole_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the whole batch."""
        return _layouts[self.structure][0]

    def pick(self, batch: Any) -> Any:
        """Returns the handle's part of a whole batch."""
        _, part, before = _layouts[self.structure]
        count = len(tf.nest.flatten(part))
        return tf.nest.pack_sequence_as(part, tf.nest.flatten(batch)[before : before + count])

    def part(self, key: Any) -> WorkerBatch:
        """Returns a handle of the component at this index or key."""
        whole, part, before = _layouts[self.structure]
        if not isinstance(part, list | tuple | dict):
            raise TypeError(f"a batch of {part!r} has no parts; look at it with tf.convert_to_tensor(batch)")
        # The number of a component's first leaf is its offset.
        numbered = tf.nest.pack_sequence_as(part, range(len(tf.nest.flatten(part))))
        leaves = tf.nest.flatten(numbered[key])
        first = before + (leaves[0] if leaves else 0)
        return self._like(describe(whole, part[key], first))

    def _like(self, structure: str) -> WorkerBatch:
        return _keeping(WorkerBatch(handle=self.handle, structure=structure), getattr(self, "_batch", None))

    def __getitem__(self, key: Any) -> Any:
        part = self.element_spec
        if isinstance(part, list | tuple | dict) and not isinstance(key, slice):
            return self.part(key)
        if isinstance(part, list | tuple):
            return [self.part(index) for index in range(len(part))[key]]
        return self.value()[key]

    def __iter__(self) -> Iterator[Any]:
        part = self.element_spec
        if isinstance(part, dict):
            return iter(part)
        if isinstance(part, list | tuple):
            return iter([self.part(index) for index in range(len(part))])
        return iter(self.value())

    def __len__(self) -> int:
        part = self.element_spec
        return len(part) if isinstance(part, list | tuple | dict) else len(self.value())

    def keys(self) -> Any:
        """The names of the components of a batch that is a dictionary."""
        return self.element_spec.keys()

    def items(self) -> list[tuple[Any, WorkerBatch]]:
        """The names and the handles of the components of a batch that is a dictionary."""
        return [(key, self.part(key)) for key in self.element_spec]

    @property
    def shape(self) -> tf.TensorShape:
        """The static shape, of a handle of one tensor."""
        return self.element_spec.shape

    @property
    def dtype(self) -> tf.DType:
        """The dtype, of a handle of one tensor."""
        return self.element_spec.dtype

    def value(self) -> Any:
        """Copies the batch, or the part, to the chief."""
        whole = self.whole_spec
        specs = flat_specs(whole)
        if tf.executing_eagerly():
            flat = [tf.convert_to_tensor(leaf) for leaf in find_batch(int(self.handle)).values()]
        else:
            flat = python_operation.call(_values, [self.handle], [spec.dtype for spec in specs])
            for tensor, spec in zip(flat, specs, strict=True):
                tensor.set_shape(spec.shape)
        return self.pick(tf.nest.pack_sequence_as(whole, flat, expand_composites=True))

    def numpy(self) -> Any:
        """The value, as an array or a structure of arrays."""
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), self.value())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(tf.convert_to_tensor(self), dtype)

    def __str__(self) -> str:
        return str(self.value())


def _convert(value: WorkerBatch, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> Any:
    del as_ref
    return tf.convert_to_tensor(value.value(), dtype, name=name)


tf.register_tensor_conversion_function(WorkerBatch, _convert)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: WorkerBatch, *others: Any) -> Any:
        value = tf.convert_to_tensor(self)
        return getattr(value, name)(*others)

    operate.__name__ = name
    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _side in ("", "r"):
        setattr(WorkerBatch, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "float", "int", "bool"):
    setattr(WorkerBatch, f"__{_name}__", _operator(f"__{_name}__"))


def handle_of(iterator_id: int, number: int) -> int:
    """Returns the int64 for a batch of a pass."""
    return (iterator_id << _POSITION_BITS) | number


def register(begun: Pass) -> None:
    """Registers a pass by its number, for its lifetime."""
    _passes[begun.id] = begun


def find_pass(handle: int) -> Pass:
    """Returns the pass that a handle belongs to."""
    return _passes[handle >> _POSITION_BITS]


def find_batch(handle: int) -> BatchOfPass:
    """Returns the batch that a handle stands for."""
    return find_pass(handle).batch(number_in(handle))


def number_in(handle: int) -> int:
    """Returns the number of a handle's batch within its pass; 0 for the next batch."""
    return handle & ((1 << _POSITION_BITS) - 1)


def describe(whole: Any, part: Any, first: int = 0) -> str:
    """Returns a description of a part, the key of its specs.

    Args:
      whole: specs of a batch.
      part: specs of the part.
      first: number of leaves of the batch before the part.
    """
    text = repr((whole, first, part))
    _layouts.setdefault(text, (whole, part, first))
    return text


def handle(number: int, structure: str, batch: BatchOfPass | None = None) -> WorkerBatch:
    """Returns a handle from its int64; it keeps `batch`, the state of the batch, alive."""
    return _keeping(WorkerBatch(handle=tf.constant(number, tf.int64), structure=structure), batch)


def _keeping(handle: WorkerBatch, batch: BatchOfPass | None) -> WorkerBatch:
    # Extension types are immutable; this attribute is no part of the value.
    own_attributes.put(handle, "_batch", batch)
    return handle


def flat_specs(spec: Any) -> list[tf.TensorSpec]:
    """Returns the specs of a batch's tensors, components of ragged and sparse tensors included."""
    return tf.nest.flatten(spec, expand_composites=True)


def as_specs(*structures: Any) -> list[Any]:
    """Replaces handles in the structures by the specs of their batches or parts."""
    return _replaced(structures, lambda handle: handle.element_spec)


def as_values(*structures: Any) -> list[Any]:
    """Replaces handles in the structures by the values of their batches or parts, on the chief."""
    return _replaced(structures, lambda handle: handle.value())


def _replaced(structures: Sequence[Any], replace: Callable[[WorkerBatch], Any]) -> list[Any]:
    def of(leaf: Any) -> Any:
        return replace(leaf) if isinstance(leaf, WorkerBatch) else leaf

    return [tf.nest.map_structure(of, structure) for structure in structures]


def handles_in(arguments: Any) -> list[WorkerBatch]:
    """Returns the handles among arguments."""
    return [leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, WorkerBatch)]


def looked_at(value: Any) -> Any:
    """Replaces handles in a structure by their values on the chief."""
    return tf.nest.map_structure(lambda leaf: leaf.value() if isinstance(leaf, WorkerBatch) else leaf, value)


def _values(handle: tf.Tensor) -> list[Any]:
    return find_batch(int(handle)).values()
