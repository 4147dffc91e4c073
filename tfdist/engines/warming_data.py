# SPDX-License-Identifier: Apache-2.0
"""The data of a warmup phase, of which Keras' `fit` gets `Turn`s instead of batches.

A turn says what this process does in an update of the phase: train alone, wait, or train together with others. A pass
over the data that begins in the phase goes on with the same iterator when the phase is over, so that all replicas are
at the same batch; a pass that begins afterwards is one of the strategy without a warmup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.framework import composite_tensor

from tfdist.engines import fitting, sharing
from tfdist.engines.threaded_data import ReplicaDataset

if TYPE_CHECKING:
    from tfdist.engines.quorum import QuorumEngine
    from tfdist.engines.warming import Warming

# Of more parts than a batch has examples the first one is empty.
_MANY = 2**40
_structures: dict[str, Any] = {}
# With the structure, so that nothing else gets its identity.
_specs: dict[tuple[int, Part, int], tuple[Any, TurnSpec]] = {}


@dataclasses.dataclass(frozen=True)
class Part:
    """How the replicas of this process take part in an update.

    Attributes:
      kind: "alone": the first replica trains by itself; "idle": it does so elsewhere; "together": several do.
      taking_part: for "together", whether each replica of this process does; those that don't get no example.
      are_all: for "together", whether all replicas of all processes do.
    """

    kind: str
    taking_part: tuple[bool, ...] = ()
    are_all: bool = False


class Turn(composite_tensor.CompositeTensor):
    """It stands for a batch in `strategy.run(model.train_step, (turn,))`.

    Args:
      spec: what is to be done.
      flat: the parts of a batch that it is done with, as flat tensors.
    """

    def __init__(self, spec: TurnSpec, flat: Sequence[tf.Tensor]) -> None:
        self._spec = spec
        self._flat = list(flat)

    @classmethod
    def of(cls, part: Part, part_spec: Any, parts: Sequence[Any]) -> Turn:
        """A turn with these parts of a batch, each of this structure of `tf.TypeSpec`s."""
        # Of the few that there are, each is made once: this is on the way of every step.
        key = (id(part_spec), part, len(parts))
        if key not in _specs:
            structure = repr(part_spec)
            _structures.setdefault(structure, part_spec)
            spec = TurnSpec(part.kind, part.taking_part, part.are_all, structure, len(parts))
            _specs[key] = (part_spec, spec)
        return cls(_specs[key][1], tf.nest.flatten(list(parts), expand_composites=True))

    @property
    def _type_spec(self) -> TurnSpec:
        return self._spec

    @property
    def part(self) -> Part:
        """What is to be done."""
        return self._spec.part

    @property
    def part_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a part."""
        return _structures[self._spec.structure]

    def parts(self) -> list[Any]:
        """The parts of a batch that it is done with."""
        structure = [self.part_spec] * self._spec.num_parts
        return tf.nest.pack_sequence_as(structure, self._flat, expand_composites=True)

    def own_part(self) -> Any:
        """What the first replica trains on alone."""
        (part,) = self.parts()
        # The first of a batch's parts, or of a pair of a part and a number of examples.
        return part.get_next()[0] if isinstance(part, tf.data.Iterator) else part

    def batch(self) -> Any:
        """What each replica of this process trains on, as distributed values."""
        parts = self.parts()
        if not self.part.are_all:
            # All processes must see from the shapes that replicas have different numbers of examples.
            shares = zip(parts, self.part.taking_part, strict=True)
            parts = [_of_any_size(part) if takes else sharing.cut(part, 0, _MANY) for part, takes in shares]
        return distribute_utils.regroup(tuple(_without_optionals(part) for part in parts), always_wrap=True)


class TurnSpec(tf.TypeSpec):
    """The type of a turn.

    Args:
      kind, taking_part, are_all: see `Part`.
      structure: names the structure of a part of a batch.
      num_parts: how many there are.
    """

    def __init__(self, kind: str, taking_part: tuple[bool, ...], are_all: bool, structure: str, num_parts: int) -> None:
        self.part = Part(kind, tuple(taking_part), are_all)
        self.structure = structure
        self.num_parts = num_parts

    @property
    def value_type(self) -> type[Turn]:
        """See `tf.TypeSpec`."""
        return Turn

    def _serialize(self) -> tuple[Any, ...]:
        part = self.part
        return part.kind, part.taking_part, part.are_all, self.structure, self.num_parts

    @property
    def _component_specs(self) -> list[tf.TypeSpec]:
        return tf.nest.flatten([_structures[self.structure]] * self.num_parts, expand_composites=True)

    def _to_components(self, value: Turn) -> list[tf.Tensor]:
        return value._flat

    def _from_components(self, components: Sequence[tf.Tensor]) -> Turn:
        return Turn(self, components)


class Source(Protocol):
    """One pass over the data, of which this process reads the parts of its replicas.

    Attributes:
      part_spec: the structure of `tf.TypeSpec`s of a part.
    """

    part_spec: Any

    def has_next(self, is_rest: bool) -> bool:
        """Whether there is another batch; if the `rest` begins with it, true also where that will tell."""
        ...

    def have_all_next(self, is_rest: bool) -> bool:
        """Whether all processes have another batch; all ask at once."""
        ...

    def pass_by(self) -> None:
        """Leaves the next batch, which there is, to others."""
        ...

    def take(self) -> list[Any]:
        """The parts of the next batch, which there is."""
        ...

    def alone(self) -> Turn:
        """The turn of the first replica, which trains alone on its part of the next batch, which there is."""
        ...

    def rest(self, model: keras.Model) -> Callable[[], Any]:
        """What gives the rest of this pass, batch by batch and at last None, now that all replicas take part."""
        ...


class TensorSource:
    """Reads a data set whose elements are parts of batches.

    Args:
      dataset: what this process reads.
      parts_of: gives the parts that an element is of.
      part_spec: see `Source`.
      have_all: given whether this process has another batch, says whether all have; None if that is the same.
      quorum: makes the rest of the pass, if it does; the data set is then as for a `QuorumDataset`.
      group: how many elements of the data set make one here.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        parts_of: Callable[[Any], list[Any]],
        part_spec: Any,
        have_all: Callable[[bool], bool] | None = None,
        quorum: QuorumEngine | None = None,
        group: int = 1,
    ) -> None:
        self.part_spec = part_spec
        self._dataset = dataset
        # Opened by those too who leave its batches to others: a shuffle draws a new order whenever that is done.
        self._iterator: Any = iter(dataset)
        if group > 1:
            # Takes them from one iterator in turn.
            self._iterator = zip(*[self._iterator] * group, strict=False)
        self._parts_of = parts_of
        self._have_all = have_all
        self._quorum = quorum
        # Below zero: nobody knows, or there is no end.
        cardinality = int(dataset.cardinality())
        self._left = cardinality // group if cardinality > 0 else cardinality
        self._left_to_others = 0
        self._ahead: Any = None
        # Has the step read the batch itself, which spares Keras' loop a good part of a small step.
        self._reads = None if group > 1 else Turn.of(Part("alone"), self._iterator._type_spec, [self._iterator])

    def has_next(self, is_rest: bool) -> bool:
        """See `Source`. If the number of batches is not known, it reads the next one to find out."""
        if self._left != tf.data.UNKNOWN_CARDINALITY or (is_rest and self._quorum):
            return self._left != 0
        if self._ahead is None:
            self._ahead = next(self._iterator, None)
        return self._ahead is not None

    def have_all_next(self, is_rest: bool) -> bool:
        """See `Source`."""
        has_next = self.has_next(is_rest)
        return has_next if self._have_all is None or (is_rest and self._quorum) else self._have_all(has_next)

    def pass_by(self) -> None:
        """See `Source`. It is not read before it must be."""
        if self._ahead is None:
            self._left_to_others += 1
        self._ahead = None
        self._left -= self._left > 0

    def take(self) -> list[Any]:
        """See `Source`."""
        self._catch_up()
        element = next(self._iterator) if self._ahead is None else self._ahead
        self._ahead = None
        self._left -= self._left > 0
        return self._parts_of(element)

    def alone(self) -> Turn:
        """See `Source`."""
        if self._reads is None or self._ahead is not None or self._left_to_others:
            return Turn.of(Part("alone"), self.part_spec, self.take()[:1])
        self._left -= self._left > 0
        return self._reads

    def rest(self, model: keras.Model) -> Callable[[], Any]:
        """See `Source`."""
        quorum = self._quorum
        if quorum is None:
            return self._together
        self._catch_up()
        begun = dataclasses.replace(quorum.begin(model, self._dataset), iterator=self._iterator)

        def next_ticket() -> Any:
            if self._left == 0:
                return None
            self._left -= self._left > 0
            return quorum.round(begun)

        return next_ticket

    def _together(self) -> Turn | None:
        if not self.have_all_next(is_rest=True):
            return None
        parts = self.take()
        return Turn.of(Part("together", (True,) * len(parts), are_all=True), self.part_spec, parts)

    def _catch_up(self) -> None:
        for _ in range(self._left_to_others):
            next(self._iterator)
        self._left_to_others = 0


class ReplicaSource:
    """Reads a `ReplicaDataset`, whose tickets make the rest of the pass.

    Args:
      dataset: the data set.
    """

    def __init__(self, dataset: ReplicaDataset) -> None:
        is_whole, num_parts = dataset.is_whole, dataset.num_parts
        self.part_spec = sharing.part_spec(dataset.element_spec, num_parts) if is_whole else dataset.element_spec
        self._iterator = iter(dataset)
        self._ticket: Any = None

    def has_next(self, is_rest: bool = False) -> bool:
        """See `Source`."""
        del is_rest
        if self._ticket is None:
            try:
                self._ticket = next(self._iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return False
        return True

    def have_all_next(self, is_rest: bool) -> bool:
        """See `Source`."""
        return self.has_next(is_rest)

    def pass_by(self) -> None:
        """See `Source`."""
        self.take()

    def take(self) -> list[Any]:
        """See `Source`."""
        self._ticket = None
        return self._iterator.take().parts()

    def alone(self) -> Turn:
        """See `Source`."""
        return Turn.of(Part("alone"), self.part_spec, self.take()[:1])

    def rest(self, model: keras.Model) -> Callable[[], Any]:
        """See `Source`."""
        del model
        return self._next_ticket

    def _next_ticket(self) -> Any:
        ticket = self._ticket if self.has_next() else None
        self._ticket = None
        return ticket


class WarmingDataset(input_lib.DistributedDataset):
    """A data set of a strategy with a warmup phase.

    It says that it is the stock `DistributedDataset`, because Keras goes by that class.

    Args:
      warming: the phase.
      whole: the same data set as the strategy distributes it without a warmup; what everybody gets but `fit`.
      open_source: begins a pass in the phase.
    """

    def __init__(self, warming: Warming, whole: Any, open_source: Callable[[], Source]) -> None:
        self._warming = warming
        self._whole = whole
        self._open_source = open_source
        # How many iterators over the data were made of which `whole` does not know, and of which it does not say.
        self._opened = self._begun = 0

    @property
    def passes(self) -> int:
        """How many iterators over the data were made."""
        return self._opened + getattr(self._whole, "passes", self._begun)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self._whole.element_spec

    @property
    def cardinality(self) -> Any:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return self._whole.cardinality

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return iter(self._whole)
        frame = fitting.fit_frame()
        model = frame.f_locals["self"] if frame else None
        if model is None:
            self._warming.settle()
        if model is None or self._warming.is_over_now():
            self._begun += model is not None
            return iter(self._whole)
        return WarmingIterator(self._warming, self._open, model)

    def _open(self) -> Source:
        source = self._open_source()
        self._opened += not isinstance(source, ReplicaSource)
        return source


class WarmingIterator:
    """One pass of `fit` that begins in the phase.

    It is no `tf.distribute.DistributedIterator`, because Keras would take such a one into a `tf.function`. It ends with
    `StopIteration`, or with `tf.errors.OutOfRangeError` where no turn was given since `iter(self)`: Keras zips over it
    `steps_per_execution` at a time, and tells the two apart.
    """

    def __init__(self, warming: Warming, open_source: Callable[[], Source], model: keras.Model) -> None:
        self._warming = warming
        self._open = open_source
        self._model = model
        self._source: Source | None = None
        self._rest: Callable[[], Any] | None = None
        self._is_ended = False
        self._given_since_iter = 0

    def __iter__(self) -> WarmingIterator:
        self._given_since_iter = 0
        return self

    def __next__(self) -> Any:
        turn = None if self._is_ended else self._next()
        if turn is None:
            self._is_ended = True
            if self._given_since_iter:
                raise StopIteration
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        self._given_since_iter += 1
        return turn

    def _next(self) -> Any:
        if self._rest is not None:
            return self._rest()
        if self._source is None:
            # Not before the first turn is asked for: Keras makes iterators that it never uses.
            self._source = self._open()
        count = self._warming.opened(self._model, self._source)
        if not count:
            return None
        if self._warming.is_over:
            self._rest = self._source.rest(self._model)
            return self._rest()
        return self._warming.turn(count, self._source)


def parts_of(dataset: tf.data.Dataset, num_parts: int) -> tf.data.Dataset:
    """All parts of each batch of a data set: tuples."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def cut(*element: Any) -> tuple[Any, ...]:
        batch = element if is_tuple else element[0]
        return tuple(sharing.cut(batch, part, num_parts) for part in range(num_parts))

    return dataset.map(tf.autograph.experimental.do_not_convert(cut)).prefetch(1)


def _of_any_size(part: Any) -> Any:
    def forget(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape.as_list()[1:]])

    return tf.nest.map_structure(forget, part)


def _without_optionals(part: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, part)
