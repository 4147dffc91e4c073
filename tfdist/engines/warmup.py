# SPDX-License-Identifier: Apache-2.0
"""The engine of `Warmup` under the mirrored strategies: the first replica trains alone, then gives all its state.

An update of the phase, on the process of the first replica and on another one:

    next(iterator): a handle of the batch              a handle of no data: the batch is read later, or never
    train_step on one part of the batch, as one        nothing: the logs are zeros
    device would, on the first copy of the variables
    ...                                                ...
    the epoch ends, or the phase does: `meet`  <---->  `meet`: waits, however long that takes
    gives its variables  --------------------------->  takes them

So processes that wait run through the steps of the phase at once, and then wait, alive, where all need the same state.
That is at the end of each epoch, before metrics are read, the model is evaluated and callbacks decide.

Data: `fit` iterates over a `WarmupDataset`; every other loop over the data set that the strategy makes without a
phase. A `WarmupIterator` that begins in the phase reads with iterators of its own. After the phase its rest is made by
the engine that decides about updates then, which takes these iterators over (`CountedDataset.rest`), or in synchronous
steps. Passes that begin after the phase are the strategy's own.

Ownership: `Warmup` counts updates or epochs, and says how many replicas take part in each. The engine holds one fact,
which model is ahead: an update that one replica makes sets it, and `meet` alone clears it. A hook that removes itself
reports the end of an epoch; that hook and `fit`'s list of callbacks report its beginning.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import calls, fit
from tfdist.compat.tensorflow import replicas
from tfdist.engines.base import Engine
from tfdist.passes import handle as handles
from tfdist.passes import splitting
from tfdist.passes.shares import Sum
from tfdist.policies.base import Update
from tfdist.policies.warmup import Warmup
from tfdist.step import one_replica
from tfdist.step.replicas import build_optimizer, check_model
from tfdist.step.step import Step


class WarmupEngine(Engine):
    """Makes the updates of the phase, and gives all replicas the first one's state.

    Args:
      strategy: the strategy; its first device in the first process has the first copies.
      warmup: says how many replicas take part; `begin` was called.
      replicas: numbers of this process' replicas.
      sum_over_workers: sums tensors over all workers.
      record: called with each update of the phase, and the number of its examples (0 if it is not known).
      agreement: exchanges JSON data with the other workers; None if there are none.
    """

    def __init__(
        self,
        strategy: Any,
        warmup: Warmup,
        replicas: Sequence[int],
        sum_over_workers: Sum,
        record: Callable[[Update, int], None],
        agreement: Any = None,
    ) -> None:
        self._strategy = strategy
        self._warmup = warmup
        self._replicas = tuple(replicas)
        self._sum_over_workers = sum_over_workers
        self._record = record
        self._agreement = agreement
        self._what = f"{agreement.tasks[0]}'s warmup phase" if agreement else ""
        # The model that the first replica has trained alone since all had the same state; as all of what follows, the
        # same in all processes.
        self._ahead: keras.Model | None = None
        # Keras' list of callbacks of the last `fit`: another `fit` has another one.
        self._callbacks: Callable[[], Any] = lambda: None
        self._is_first_of_epoch = True
        self._is_resumed_in_epoch = False
        # By model, what removes the hook at the end of its epoch; a `fit` that has ended or raised has left it.
        self._hooks: weakref.WeakKeyDictionary[keras.Model, Callable[[], None]] = weakref.WeakKeyDictionary()

    @property
    def is_chief_ahead(self) -> bool:
        """See `SavedState.is_chief_ahead`."""
        return self._ahead is not None

    def restore(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """See `SavedState.restore`."""
        self._is_resumed_in_epoch = is_in_epoch

    def distribute(
        self, whole: Any, datasets: Sequence[tf.data.Dataset], is_whole: bool = False, is_same_length: bool = True
    ) -> Any:
        """A data set that begins with the phase; for the arguments see `WarmupDataset`."""
        if self._warmup.is_over or not tf.executing_eagerly():
            return whole
        return WarmupDataset(self, whole, datasets, is_whole, is_same_length)

    def open(self, dataset: WarmupDataset, fit: calls.Call | None) -> WarmupIterator | None:
        """Opens a pass of the phase; None if it is one of the data set `whole`."""
        if fit is None or self._callbacks() is not fit.callbacks:
            # Leftovers of an interrupted `fit`, too.
            self.meet(is_ended=True)
            if fit is None:
                return None
            self._callbacks = weakref.ref(fit.callbacks)
            self._is_first_of_epoch, self._is_resumed_in_epoch = not self._is_resumed_in_epoch, False
            self._watch_epoch(fit.model)
        if self._is_first_of_epoch and self._warmup.taking_part_next(True) == self._warmup.total_num_replicas:
            self._count_update()
        if not self._warmup.is_over:
            return WarmupIterator(dataset, lambda a_pass: self._begin_update(a_pass, fit.model))
        dataset.opened += not isinstance(dataset.whole, handles.CountedDataset)
        return None

    def _begin_update(self, of: WarmupIterator, model: keras.Model) -> Any:
        """Begins an update that Keras asks for.

        Returns:
          A handle; None at the end of the data; after the phase also an iterator of handles, for the rest of the pass.
        """
        warmup = self._warmup
        count = warmup.taking_part_next(self._is_first_of_epoch)
        whole = of.dataset.whole
        rest = whole.rest if count == warmup.total_num_replicas and isinstance(whole, handles.CountedDataset) else None
        # The rest must find the end itself: nothing may have been read ahead.
        has_next = of.left != 0 if rest else of.has_next()
        if count > 1 and not (self._ahead or rest or of.dataset.is_same_length):
            (missing,) = self._sum_over_workers([tf.constant(int(not has_next), tf.int64)])
            has_next = not int(missing)
        # If some replicas have to catch up, the end of the data is the end of an epoch, where all meet.
        if not has_next or (count > 1 and not self.meet(is_ended=False)):
            return None
        self._count_update()
        self._ahead = model if count == 1 else None
        if rest:
            return rest(of.iterators(), of.left)
        if not warmup.is_over:
            size = splitting.static_size(of.element_spec) or 0
            num_parts = warmup.total_num_replicas if of.dataset.is_whole else 1
            update = Update(warmup.begun, tuple(range(count)), (), (0,) * count, 0.0, 0.0, ())
            self._record(update, size * count // num_parts)
        return of.handle(self, count, is_read=count > 1 or 0 in self._replicas)

    def prepared(self, step: Step, handle: handles.BatchHandle) -> Callable[[Any, Any], Any]:
        """See `Engine.prepared`. A step returns zeros where the process waits."""
        (count, _, is_to_be_read, is_whole), model = handle.kind.form, step.model
        if count == 1:
            check_model(self._strategy, model)
            build_optimizer(self._strategy, model)
        spec, content = handle.kind.element_spec, handle.whole
        if not content:
            zeros = one_replica.zeros_of(functools.partial(self._alone, step), spec[0])
            return lambda iterator, handle: zeros
        spec = [tf.type_spec_from_value(each) if is_to_be_read else spec for each in content]

        def update(*flat: tf.Tensor) -> Any:
            content = tf.nest.pack_sequence_as(spec, flat, expand_composites=True)
            return self._update(step, count, self._parts(content, is_whole))

        if not model.run_eagerly:
            specs = tf.nest.flatten(spec, expand_composites=True)
            update = tf.function(update, specs, autograph=False, jit_compile=model.jit_compile)
        return lambda iterator, handle: update(*splitting.flat(handle.whole))

    def _alone(self, step: Step, part: Any) -> Any:
        with one_replica.alone(step.model, self._strategy):
            return tf.nest.map_structure(tf.convert_to_tensor, step.function(handles.without_optionals(part)))

    def _parts(self, content: list[Any], is_whole: bool) -> list[Any]:
        """The parts of this process' replicas, of what `WarmupIterator.handle` gives a step; in a graph or outside."""
        with tf.device("/device:CPU:0"):
            if _is_to_be_read(content):
                content = _read(content)
            if is_whole:
                total = self._warmup.total_num_replicas
                parts = [splitting.cut(content[0], replica, total) for replica in self._replicas]
            else:
                parts = content if len(content) > 1 else content[0][: len(self._replicas)]
        return [handles.without_optionals(part) for part in parts]

    def _update(self, step: Step, count: int, parts: list[Any]) -> Any:
        """Makes an update of so many replicas from the parts of this process, in a graph or eagerly."""
        if count == 1:
            return self._alone(step, parts[0])
        if count < self._warmup.total_num_replicas:
            # All processes must see from the shapes that replicas have different numbers of examples.
            pairs = zip(parts, self._replicas, strict=True)
            parts = [splitting.any_size(part) if number < count else splitting.empty(part) for part, number in pairs]
        return self._strategy.run(step.function, (replicas.values_of_replicas(parts),))

    def meet(self, is_ended: bool) -> bool:
        """Gives all replicas the state of the first one, unless they have it.

        Args:
          is_ended: whether this process is at the end of an epoch.

        Returns:
          True if all continue where they are; else all end the epoch.
        """
        model = self._ahead
        if model is None:
            return True
        # Callbacks may have stopped the first one, who alone has seen the logs, in mid-epoch.
        word = {"begun": self._warmup.begun, "ended": is_ended, "stopped": bool(getattr(model, "stop_training", False))}
        words = [*self._agreement.gather(word, self._what).values()] if self._agreement else [word]
        variables = [variable for variable in one_replica.variables_of(model) if not one_replica.is_counter(variable)]
        one_replica.broadcast(variables, 0 in self._replicas, self._sum_over_workers)
        self._warmup.resume(words[0]["begun"])
        model.stop_training = any(word["stopped"] for word in words)
        self._ahead = None
        return is_ended or not any(word["ended"] for word in words)

    def _count_update(self) -> None:
        self._warmup.opened(self._is_first_of_epoch)
        self._is_first_of_epoch = False

    def _watch_epoch(self, model: keras.Model) -> None:
        self._hooks.pop(model, lambda: None)()
        if not self._warmup.is_over:
            self._hooks[model] = fit.change_logs_once(model, self._end_epoch)

    def _end_epoch(self, model: keras.Model, logs: Any, logs_of: fit.Logs) -> Any:
        """The logs of an epoch, the first thing that `fit` asks for at its end."""
        self.meet(is_ended=True)
        self._is_first_of_epoch = True
        found = logs_of(logs)
        if found is logs and self._agreement and self._warmup.num_taking_part == 1:
            # The metrics' counts add up over all replicas; other logs only the first one has.
            plain = lambda: tf.nest.map_structure(lambda leaf: np.asarray(leaf).tolist(), logs)  # noqa: E731
            found = self._agreement.from_chief(plain, self._what)
        self._watch_epoch(model)
        return found


# The data of a warmup phase: what this process reads of each batch, and the parts of its replicas.


class WarmupDataset(handles.CountedDataset):
    """A data set that begins with the phase.

    Args:
      engine: opens passes over it.
      whole: the data set as the strategy makes it without a phase.
      datasets: data of this process in the phase: a data set of parts of batches for each of its replicas, or one data
        set of tuples that begin with their parts.
      is_whole: whether it is one data set of whole batches instead, of which each replica takes its part.
      is_same_length: whether all processes come to the end of the data in the same step.
    """

    def __init__(
        self, engine: Any, whole: Any, datasets: Sequence[tf.data.Dataset], is_whole: bool, is_same_length: bool
    ) -> None:
        super().__init__(engine, tf.data.Dataset.zip(tuple(datasets)), lambda: whole)
        self.datasets = datasets
        self.is_whole = is_whole
        self.is_same_length = is_same_length

    @property
    def passes(self) -> int:
        """Number of iterators that were opened over the data, those that `whole` counts included."""
        return self.opened + (self.whole.passes if isinstance(self.whole, handles.CountedDataset) else 0)


class WarmupIterator(handles.HandleIterator):
    """One pass of `fit` that begins in the phase.

    Args:
      dataset: the data set.
      begin_update: given this pass, returns the next handle, None at the end, or what makes the handles from now on.

    Attributes:
      element_spec: structure of `tf.TypeSpec`s of an element.
      left: number of batches that are left; below zero if it is not known, or there is no end.
    """

    def __init__(self, dataset: WarmupDataset, begin_update: Callable[[WarmupIterator], Any]) -> None:
        self.dataset = dataset
        self.element_spec = dataset.datasets[0].element_spec
        self._begin_update = begin_update
        # Not at the first batch, and also where all batches are left to others: Keras makes iterators that it never
        # reads, and each of a shuffle draws an order.
        self._iterators: list[Any] = [iter(each) for each in dataset.datasets]
        self.left = dataset.cardinality
        dataset.opened += 1
        self._ahead: list[Any] = []
        self._num_skipped = 0
        self._kinds: dict[Any, handles.HandleKind] = {}
        self._rest: handles.HandleIterator | None = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._rest is None:
            found = self._begin_update(self)
            if not isinstance(found, handles.HandleIterator):
                return found
            self._rest = found
        return self._rest.next_handle()

    def has_next(self) -> bool:
        """True if there is another batch, which is read ahead if their number is not known."""
        if self.left == tf.data.UNKNOWN_CARDINALITY and not self._ahead:
            try:
                self._ahead = _read(self._iterators)
            except tf.errors.OutOfRangeError:
                self.left = 0
        return self.left != 0

    def iterators(self) -> list[Any]:
        """The iterators, past the batches that were skipped."""
        for _ in range(self._num_skipped):
            _read(self._iterators)
        self._num_skipped = 0
        return self._iterators

    def handle(self, engine: Any, count: int, is_read: bool) -> handles.BatchHandle:
        """A handle of the next batch, which there is. Its `whole` has elements of the data, or iterators for the step.

        Args:
          engine: runs the step.
          count: number of replicas that take part.
          is_read: whether this process reads it, or the step from the iterators, which is quicker; if not, `whole` is
            empty, and it is read when a later one is.
        """
        content = (self._ahead or self.iterators()) if is_read else []
        self._num_skipped += not (is_read or self._ahead)
        self._ahead = []
        self.left -= self.left > 0
        # Each kind is looked up once in a pass: this is on the way of every step.
        key = count, len(content), _is_to_be_read(content)
        if key not in self._kinds:
            self._kinds[key] = handles.kind_of(engine, self.element_spec, (*key, self.dataset.is_whole))
        return handles.BatchHandle(self._kinds[key], self, content)


def _read(iterators: Sequence[Any]) -> list[Any]:
    return [iterator.get_next() for iterator in iterators]


def _is_to_be_read(content: Sequence[Any]) -> bool:
    return bool(content) and isinstance(content[0], tf.data.Iterator)
