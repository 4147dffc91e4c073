# SPDX-License-Identifier: Apache-2.0
"""The handle of a batch: what Keras carries from `next(iterator)` to the step, where Python makes each step.

    DistributedDataset.__iter__        opens a pass; Keras gets its iterator
    next(iterator)  ->  BatchHandle    names the engine and the pass, and reads at most data
    executions                         takes a handle, and has the engine make the step

Engines of parameter servers, of policies that decide about updates, and of warmup phases make each step in plain
Python: in `fit` within `executions`, in a user's loop within `run`. A handle is a plain object, and no graph takes one
(`check_eager`). Where the graph of Keras' own function makes the steps, `fit` reads with tf.data's own iterator
(`step_times.timed`): on several workers without a policy, and where replicas train alone and average.

Ownership. A `HandleKind` is the type of all handles that one trace serves. A strategy owns its engine, the engine its
kinds, Keras the iterator, and a handle its pass. The pass owns the position in the data.

The end of the data. An iterator ends where the number of batches is known, which all workers have compared. Where it
is not known under a multi-worker policy, the step raises `tf.errors.OutOfRangeError` on all workers for the same step,
before any of its operations writes; Keras takes that for the end of the epoch. Of `steps_per_execution` steps those
before it are made then, and are an execution (`executions`).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import graphs, inputs, replicas

_KINDS = "_tfdist_kinds"


@dataclasses.dataclass(frozen=True, eq=False)
class HandleKind:
    """The type of the handles that one trace of a step serves.

    Attributes:
      engine_of: returns the engine that makes the steps on the handles; None if it is gone.
      element_spec: the structure of `tf.TypeSpec`s of a batch, or of the engine's own elements.
      form: for the engine, hashable: how it runs a step on such a batch.
    """

    engine_of: Callable[[], Any]
    element_spec: Any
    form: Any


def kind_of(engine: Any, element_spec: Any, form: Hashable = ()) -> HandleKind:
    """Returns the kind of these properties, kept by the engine: the same each time, so that a step is traced once."""
    kinds = patching.setdefault(engine, _KINDS, dict)
    # Two threads may fit two models.
    return kinds.setdefault((repr(element_spec), form), HandleKind(weakref.ref(engine), element_spec, form))


class BatchHandle(tf.distribute.DistributedValues):
    """Handle of a batch, for `strategy.run(step, (handle,))`.

    Args:
      kind: its type.
      of: the pass that it is of, which it keeps alive.
      whole: the batch itself, where this process reads whole ones.
    """

    def __init__(self, kind: HandleKind, of: Any, whole: Any = None) -> None:
        self.kind = kind
        self.of = of
        self.whole = whole

    @property
    def engine(self) -> Any:
        """The `engines.base.Engine` that runs train steps on it."""
        return self.kind.engine_of()

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Refuses to be an argument of a `tf.function`, which would read the batch, or trace anew for each."""
        return refuse_graph("a batch")

    def __iter__(self) -> Any:
        raise refused("a batch that is unpacked")


def refused(received: str) -> ValueError:
    """Returns the error about a batch of a policy that is used otherwise than for a train step.

    Args:
      received: what the loop does with it.
    """
    return ValueError(
        "under policies a batch is for a train step alone: for batch in "
        "strategy.experimental_distribute_dataset(dataset): logs = strategy.run(model.train_step, args=(batch,)); "
        f"other data are for model.evaluate and model.predict. Received: {received}"
    )


def check_eager(received: str) -> None:
    """Raises RuntimeError within a `tf.function`, where no step of servers or of a policy can be made."""
    if not tf.executing_eagerly():
        refuse_graph(received)


def refuse_graph(received: str = "a data set") -> Any:
    """Raises the error of `check_eager`."""
    raise RuntimeError(
        "under ParameterServerStrategy, and under policies, Python makes each step, and strategy.run compiles its "
        "function by itself: leave the tf.function around the loop away, and write: for batch in "
        "strategy.experimental_distribute_dataset(dataset): logs = strategy.run(model.train_step, args=(batch,)). "
        f"Received: {received} within a tf.function"
    )


class DistributedDataset(inputs.DistributedDatasetBase):
    """A data set that an engine reads for `fit`, and the stock strategy for all others.

    It has the class of the stock data set, because Keras goes by that when it decides what `fit` takes, and nothing
    else of it.

    Args:
      engine: opens passes over it.
      own: what this process reads of it for the engine.
      whole: returns the same data set as the stock strategy distributes it; called once, when it is needed.
    """

    def __init__(self, engine: Any, own: tf.data.Dataset, whole: Callable[[], Any]) -> None:
        self.own = own
        self._engine = engine
        self._make_whole = whole

    @functools.cached_property
    def whole(self) -> Any:
        """The data set as the stock strategy distributes it."""
        return self._make_whole()

    @property
    def in_graphs(self) -> Any:
        """The data set that a graph reads in its place."""
        return self.whole

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of a batch."""
        return self.whole.element_spec

    @property
    def part_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the part of a batch that a replica computes with."""
        return replicas.first_spec(self.element_spec)

    @property
    def cardinality(self) -> int:
        """Batches in one pass, or one of tf.data's constants for an unknown or endless number."""
        return int(self.own.cardinality())

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return iter(self.in_graphs)
        opened = self._engine.open(self, calls.iterating_fit())
        return iter(self.whole) if opened is None else opened


class CountedDataset(DistributedDataset):
    """Data set whose passes read nothing, and open no iterator, before the first handle.

    `Resume` has to open as many iterators as there were, so it reads their number. Without the attribute `passes` it
    counts how often Keras opens an iterator.

    Attributes:
      opened: how many iterators over the data were opened; counted by the engine.
    """

    opened = 0

    @property
    def passes(self) -> int:
        """Number of iterators over the data that were opened in `fit`."""
        return self.opened

    def rest(self, iterators: Sequence[Any], left: int) -> HandleIterator:
        """Opens a pass over what iterators over the engine's own data have left.

        Args:
          iterators: one for all replicas of this process, or one for each.
          left: how many batches they have left; below zero if their number is not known, or there is no end.
        """
        return self._engine.rest(self, iterators, left)


class HandleIterator:
    """One pass over a `DistributedDataset`.

    It is no `tf.distribute.DistributedIterator`: Keras would pass the whole iterator into a `tf.function` instead of
    taking one batch at a time.

    Attributes:
      is_ended: True once the data have ended.
      count: how many batches the last handle stands for.
    """

    is_ended = False
    count = 1

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Refuses to be an argument of a `tf.function`, whatever this does with it."""
        return refuse_graph("an iterator")

    def __iter__(self) -> HandleIterator:
        return self

    def __next__(self) -> BatchHandle:
        handle = None if self.is_ended else self.next_handle()
        if handle is None:
            self.is_ended = True
            raise StopIteration
        return handle

    def next_handle(self) -> BatchHandle | None:
        """The next handle, or None at the end of the data."""
        raise NotImplementedError

    def take_handle(self, wanted: int) -> BatchHandle | None:
        """The next handle for `executions`, of at most so many batches; or None at the end of the data."""
        del wanted
        return self.next_handle()

    def get_next(self) -> BatchHandle:
        """The same as `next(self)`, which raises `tf.errors.OutOfRangeError` at the end of the data."""
        for handle in self:
            return handle
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")


def executions(
    model: Any, stock: Callable[[Any], Any], prepare: Callable[[BatchHandle], Callable[[Any, BatchHandle], Any]]
) -> Callable[[Any], Any]:
    """Returns the function that makes an execution of `fit` or `evaluate` in plain Python: of a few steps, one by one.

    Args:
      model: the model.
      stock: makes an execution of an iterator that gives no handles; the function that Keras has made, mostly.
      prepare: called with the first handle of each kind; returns what makes a step of a handle, and returns the logs.
        Its arguments are the iterator and the handle.
    """
    prepared: dict[HandleKind, Callable[[Any, BatchHandle], Any]] = {}

    @functools.wraps(stock)
    def function(iterator: Any) -> Any:
        if not isinstance(iterator, HandleIterator):
            return stock(iterator)
        logs: Any = None
        left = steps = model.steps_per_execution
        try:
            while left > 0 and not iterator.is_ended:
                # A step that runs eagerly takes its batch as one of a user's loop does.
                handle = iterator.next_handle() if model.run_eagerly else iterator.take_handle(left)
                if handle is None:
                    iterator.is_ended = True
                    break
                make = prepared.get(handle.kind)
                if make is None:
                    make = prepared[handle.kind] = prepare(handle)
                logs = make(iterator, handle)
                left -= iterator.count
        except tf.errors.OutOfRangeError:
            # Of data of unknown length; the last execution is of as many steps as there were data for.
            iterator.is_ended = True
        except tf.errors.OpError as error:
            raise graphs.brief(error) from None
        if left == steps:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return logs

    return function


def is_optional(leaf: Any) -> bool:
    """Returns True if a leaf of a batch is a `tf.experimental.Optional`, Keras' form of None, or its spec."""
    return isinstance(leaf, tf.experimental.Optional | tf.OptionalSpec)


def part_spec(distributed: Any) -> Any:
    """The structure of `tf.TypeSpec`s of a replica's part of a batch, of any distributed data set.

    A part of a batch that is always None is None here too.
    """
    is_own = isinstance(distributed, DistributedDataset)
    spec = distributed.part_spec if is_own else replicas.first_spec(distributed.element_spec)
    return without_none_specs(spec)


def without_none_specs(spec: Any) -> Any:
    """A structure of `tf.TypeSpec`s with None where a component is always None, or Keras has an Optional for it."""
    is_none = lambda leaf: is_optional(leaf) or isinstance(leaf, tf.NoneTensorSpec)  # noqa: E731
    return tf.nest.map_structure(lambda leaf: None if is_none(leaf) else leaf, spec)


def without_optionals(batch: Any) -> Any:
    """A batch with None where Keras has an empty Optional for it."""
    return tf.nest.map_structure(lambda leaf: None if is_optional(leaf) else leaf, batch)


def without_optional_components(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A data set with None where Keras has an empty Optional for the None of a generator.

    Keras itself looks for it in a whole batch, not in the parts of replicas.
    """
    if not any(map(is_optional, tf.nest.flatten(dataset.element_spec))):
        return dataset
    return dataset.map(lambda *batch: without_optionals(batch))
