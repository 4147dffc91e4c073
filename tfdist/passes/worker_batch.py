# SPDX-License-Identifier: Apache-2.0
"""Handles of batches in the chief's loop, and the transfer of a batch to the chief.

`next(iterator)` returns a **handle** of each batch: a `WorkerBatch`, which is a `BatchHandle` (`passes/handle`).
Unpacking it returns handles of the parts of the batch, which are of other kinds. Inside a function given to
`strategy.run`, a handle is replaced by the batch, or by the part.

The **owner** of a batch is the process that reads it:

* A batch is not read before its handle is used.
* The first `strategy.run` with the handle, or with parts of it, reads the batch. It does so on the worker of the step,
  from this worker's share, or on the chief, if the chief feeds this pass. The worker keeps the batch for the lifetime
  of the handle.
* The chief may need the value (`numpy()`, a TensorFlow operation, `print`, `strategy.gather`,
  `experimental_local_results`). Then the batch is *materialised*: fetched from its worker, or read if no worker has it.
  If this is the first batch of the pass, the chief feeds the whole pass from then on.
* A second `strategy.run` with the same handle may run on another worker, and a step with several batches needs the
  batches of several workers. Such batches are materialised, and sent with the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.passes import handle as handles
from tfdist.passes.handle import BatchHandle, HandleKind, check_eager


@dataclasses.dataclass(frozen=True)
class PartLayout:
    """Place of a part in its batch: the form of a handle's kind.

    Attributes:
      whole: the structure of `tf.TypeSpec`s of the whole batch.
      text: description of that structure.
      first: number of leaves of the batch before the part.
      marks_end: see `WorkerDataset`.
      has_totals: see `WorkerDataset`.
    """

    whole: Any = dataclasses.field(compare=False)
    text: str
    first: int
    marks_end: bool = False
    has_totals: bool = False


class WorkerBatch(BatchHandle):
    """Handle of a batch on the workers, or of a part of it.

    It stands for the batch in `strategy.run(fn, args=(batch,))`; inside `fn` it is the batch itself. It can be unpacked
    like the batch, and is converted to the batch's value where a tensor is needed.

    Args:
      kind: its type, with a `PartLayout`; a function is traced for each kind.
      batch: the state of the batch, a `worker_pass.Batch`; by default it stands for the next one of the pass that takes
        it.
    """

    def __init__(self, kind: HandleKind, batch: Any = None) -> None:
        super().__init__(kind, batch and batch.iterator)
        self.batch = batch

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batch, or of the part."""
        return self.kind.element_spec

    @property
    def whole_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the whole batch."""
        return self.kind.form.whole

    def pick(self, batch: Any) -> Any:
        """Returns the handle's part of a whole batch."""
        part, first = self.element_spec, self.kind.form.first
        count = len(tf.nest.flatten(part))
        return tf.nest.pack_sequence_as(part, tf.nest.flatten(batch)[first : first + count])

    def part(self, key: Any) -> WorkerBatch:
        """Returns a handle of the component at this index or key."""
        part, layout = self.element_spec, self.kind.form
        if not isinstance(part, list | tuple | dict):
            raise TypeError(f"a batch of {part!r} has no parts; look at it with tf.convert_to_tensor(batch)")
        # The number of a component's first leaf is its offset.
        numbered = tf.nest.pack_sequence_as(part, range(len(tf.nest.flatten(part))))
        leaves = tf.nest.flatten(numbered[key])
        first = layout.first + (leaves[0] if leaves else 0)
        kind = handles.kind_of(self.engine, part[key], dataclasses.replace(layout, first=first))
        return WorkerBatch(kind, self.batch)

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
        check_eager("the value of a batch")
        flat = [tf.convert_to_tensor(leaf) for leaf in self.batch.values()]
        return self.pick(tf.nest.pack_sequence_as(self.whole_spec, flat, expand_composites=True))

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


def kind_of(engine: Any, element_spec: Any, marks_end: bool = False, has_totals: bool = False) -> HandleKind:
    """Returns the kind of the handles of whole batches; see `PartLayout`."""
    return handles.kind_of(engine, element_spec, PartLayout(element_spec, repr(element_spec), 0, marks_end, has_totals))


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
