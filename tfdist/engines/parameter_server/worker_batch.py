# SPDX-License-Identifier: Apache-2.0
"""The handle that stands for a batch in the chief's loop, and when the batch itself gets to the chief.

A **handle** (`WorkerBatch`) is given for each batch by `next(iterator)`. It names the pass and the position; in graph
form it is one int64. Unpacking it gives handles of its parts, which stand for the same batch. Inside the function that
`strategy.run` is given, each is the batch, or the part.

The **owner** of a batch is whoever reads it:

* Until a handle is used, nobody has read the batch.
* The first `strategy.run` that is given the handle, or parts of it, has the batch read: on the worker that takes the
  step, from that worker's share, or by the chief, where it feeds this pass. The worker keeps the batch for as long as
  the handle lives.
* Where the value is looked at on the chief (`numpy()`, a TensorFlow operation, `print`, `strategy.gather`,
  `experimental_local_results`), the batch is *materialised*: fetched from the worker that has it, or, if nobody has,
  read. If this is the first batch that the pass gives, the chief feeds the whole pass from then on.
* A second `strategy.run` with the same handle may be taken by another worker; and one that is given several batches at
  once takes them from different ones. Such batches are materialised, and sent along with the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.compat import own_attributes, python_operation

# A handle is the number of its pass, and in the lower bits that of the batch. Zero is "the next one".
_POSITION_BITS = 40

_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
# By the description of a part: the spec of the whole batch, that of the part, and how many leaves come before it.
_layouts: dict[str, tuple[Any, Any, int]] = {}


class BatchOfPass(Protocol):
    """The part of a batch that a handle needs."""

    def values(self) -> list[Any]:
        """The batch on the chief, flat."""
        ...


class Pass(Protocol):
    """The part of a pass over the data that its handles need.

    Attributes:
      id: the number of the pass in this program.
    """

    id: int

    def batch(self, number: int) -> BatchOfPass:
        """The batch that a handle of this number stands for."""
        ...

    def next_for_graph(self) -> int:
        """The int64 of a handle of the next batch, for a handle that is made within a graph."""
        ...


class WorkerBatch(tf.experimental.ExtensionType, tf.distribute.DistributedValues):
    """A handle for one batch that lives on the workers, or for a part of it.

    It stands for the batch in `strategy.run(fn, args=(batch,))`; inside `fn` it is the batch itself. It can be unpacked
    as the batch could; and where a tensor is needed, it becomes the batch's value.

    Attributes:
      handle: int64 scalar, which batch of which pass.
      structure: describes the part, so that a `tf.function` is traced anew for another one.
    """

    handle: tf.Tensor
    structure: str

    # ExtensionType lists what a subclass adds as fields, unless it is a method.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    class Spec:
        """The type spec that TensorFlow derives, but for one method, which it calls for each step."""

        def to_tensors(self, value: WorkerBatch) -> list[tf.Tensor]:
            """See `tf.types.experimental.TraceType`: what the inherited one gives, in a twentieth of its time."""
            return [value.handle]

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of what it stands for."""
        return _layouts[self.structure][1]

    @property
    def whole_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the whole batch."""
        return _layouts[self.structure][0]

    def pick(self, batch: Any) -> Any:
        """The part of a whole batch that it stands for."""
        _, part, before = _layouts[self.structure]
        count = len(tf.nest.flatten(part))
        return tf.nest.pack_sequence_as(part, tf.nest.flatten(batch)[before : before + count])

    def part(self, key: Any) -> WorkerBatch:
        """A handle of the component at this index or key."""
        whole, part, before = _layouts[self.structure]
        if not isinstance(part, list | tuple | dict):
            raise TypeError(f"a batch of {part!r} has no parts; look at it with tf.convert_to_tensor(batch)")
        # Numbered, the leaves of a component tell where it begins.
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
        """The batch, or the part, itself, brought to the chief."""
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
    """The int64 for a batch of a pass."""
    return (iterator_id << _POSITION_BITS) | number


def register(begun: Pass) -> None:
    """Makes a pass known by its number, as long as it lives."""
    _passes[begun.id] = begun


def find_pass(handle: int) -> Pass:
    """Returns the pass that a handle belongs to."""
    return _passes[handle >> _POSITION_BITS]


def find_batch(handle: int) -> BatchOfPass:
    """Returns the batch that a handle stands for."""
    return find_pass(handle).batch(number_in(handle))


def number_in(handle: int) -> int:
    """The number of a handle's batch within its pass; 0 stands for whichever is the next."""
    return handle & ((1 << _POSITION_BITS) - 1)


def describe(whole: Any, part: Any, first: int = 0) -> str:
    """The description of a part, by which its specs are found.

    Args:
      whole: the specs of a batch.
      part: those of the part.
      first: how many leaves of the batch come before it.
    """
    text = repr((whole, first, part))
    _layouts.setdefault(text, (whole, part, first))
    return text


def handle(number: int, structure: str, batch: BatchOfPass | None = None) -> WorkerBatch:
    """A handle of the batch that this int64 stands for; it keeps the state of the batch, if it is given that."""
    return _keeping(WorkerBatch(handle=tf.constant(number, tf.int64), structure=structure), batch)


def _keeping(handle: WorkerBatch, batch: BatchOfPass | None) -> WorkerBatch:
    # Extension types can't be changed by their users; this is no part of the value.
    own_attributes.put(handle, "_batch", batch)
    return handle


def flat_specs(spec: Any) -> list[tf.TensorSpec]:
    """The specs of a batch's tensors, those that make up ragged and sparse ones among them."""
    return tf.nest.flatten(spec, expand_composites=True)


def as_specs(*structures: Any) -> list[Any]:
    """The structures with the spec of a batch, or part of one, where they have its handle."""
    return _replaced(structures, lambda handle: handle.element_spec)


def as_values(*structures: Any) -> list[Any]:
    """The structures with a batch, or part of one, on the chief where they have its handle."""
    return _replaced(structures, lambda handle: handle.value())


def _replaced(structures: Sequence[Any], replace: Callable[[WorkerBatch], Any]) -> list[Any]:
    def of(leaf: Any) -> Any:
        return replace(leaf) if isinstance(leaf, WorkerBatch) else leaf

    return [tf.nest.map_structure(of, structure) for structure in structures]


def handles_in(arguments: Any) -> list[WorkerBatch]:
    """The handles among arguments."""
    return [leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, WorkerBatch)]


def looked_at(value: Any) -> Any:
    """The value, on the chief, of a structure in which there may be handles."""
    return tf.nest.map_structure(lambda leaf: leaf.value() if isinstance(leaf, WorkerBatch) else leaf, value)


def _values(handle: tf.Tensor) -> list[Any]:
    return find_batch(int(handle)).values()
