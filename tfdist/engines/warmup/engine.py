# SPDX-License-Identifier: Apache-2.0
"""Leads `fit` through the warmup phase of a mirrored strategy; the package's docstring has the design."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import epoch_logs, running_loop, values_of_replicas
from tfdist.data import handle as handles
from tfdist.data import splitting
from tfdist.data.shares import Sum
from tfdist.engines.warmup.data import BATCHES, Batches, parts_of
from tfdist.policies.base import Update
from tfdist.policies.saved_state import SavedState
from tfdist.policies.warmup import Warmup
from tfdist.step import copies, one_replica, replicated_step


class WarmupEngine(SavedState):
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
        self._device: str = strategy.extended.worker_devices[0]
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

    @property
    def is_chief_ahead(self) -> bool:
        """See `SavedState.is_chief_ahead`."""
        return self._ahead is not None

    def take(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """See `SavedState.take`."""
        self._is_resumed_in_epoch = is_in_epoch

    def distribute(
        self, whole: Any, datasets: Sequence[tf.data.Dataset], elements: str, is_same_length: bool = True
    ) -> Any:
        """A data set that begins with the phase.

        Args:
          whole: the data set as the strategy makes it without a phase.
          datasets: the same for `Batches`.
          elements: kind of their elements, such as `PARTS`.
          is_same_length: whether all processes come to the end of the data in the same step.
        """
        if self._warmup.is_over or not tf.executing_eagerly():
            return whole
        begin = functools.partial(Batches, datasets, elements, len(self._replicas), is_same_length)
        return _WarmupDataset(self, whole, begin)

    def open(self, dataset: _WarmupDataset, fit: running_loop.Fit | None) -> _Pass | None:
        """Opens a pass of the phase; None if it is one of the data set `whole`."""
        is_same_fit = fit is not None and self._callbacks() is fit.callbacks
        if not is_same_fit:
            # What an interrupted `fit` has left, too.
            self.meet(is_ended=True)
        if fit is None:
            return None
        if not is_same_fit:
            self._callbacks = weakref.ref(fit.callbacks)
            self._is_first_of_epoch, self._is_resumed_in_epoch = not self._is_resumed_in_epoch, False
            self._watch_epoch(fit.model)
        if self._is_first_of_epoch and self._warmup.taking_part_next(True) == self._warmup.total_num_replicas:
            self._count_update()
        if not self._warmup.is_over:
            return _Pass(self, dataset, fit.model)
        dataset.opened += not hasattr(dataset.whole, "passes")
        return None

    def begin_update(self, whole: Any, batches: Batches, model: keras.Model) -> Any:
        """Begins an update that Keras asks for.

        Returns:
          A handle; None at the end of the data; after the phase also an iterator of handles, for the rest of the pass.
        """
        warmup = self._warmup
        count = warmup.taking_part_next(self._is_first_of_epoch)
        rest = getattr(whole, "rest", None) if count == warmup.total_num_replicas else None
        # What makes the rest is to find the end itself: nothing must have been read ahead.
        has_next = batches.left != 0 if rest else batches.has_next()
        if count > 1 and not (self._ahead or rest or batches.is_same_length):
            (missing,) = self._sum_over_workers([tf.constant(int(not has_next), tf.int64)])
            has_next = not int(missing)
        # Where some have to catch up, the end of the data is the end of an epoch, where all meet.
        if not has_next or (count > 1 and not self.meet(is_ended=False)):
            return None
        self._count_update()
        self._ahead = model if count == 1 else None
        if rest:
            return rest(batches.iterators(), batches.left)
        if not warmup.is_over:
            size = splitting.static_size(batches.element_spec) or 0
            num_parts = warmup.total_num_replicas if batches.elements == BATCHES else 1
            update = Update(warmup.begun, tuple(range(count)), (), (0,) * count, 0.0, 0.0, ())
            self._record(update, size * count // num_parts)
        content = batches.take() if count > 1 or 0 in self._replicas else batches.skip()
        return batches.handle(self, (count, batches.elements), content)

    def run(self, step: Callable[..., Any], handle: handles.BatchHandle) -> Any:
        """Makes an update; in a graph, or eagerly.

        Args:
          step: a bound `train_step`.
          handle: of a data set of this engine.

        Returns:
          What the step returns; zeros where the process waits.
        """
        (count, elements), content, total = handle.kind.form, handle.content, self._warmup.total_num_replicas
        model: keras.Model = getattr(step, "__self__")  # noqa: B009

        def alone(part: Any) -> Any:
            with one_replica.alone(model, self._device):
                return tf.nest.map_structure(tf.convert_to_tensor, step(handles.without_optionals(part)))

        if count == 1:
            replicated_step.check_xla(self._strategy, model)
            replicated_step.prepare(self._strategy, model)
            if not content:
                return one_replica.zeros_of(alone, handle.kind.element_spec[0])
        parts = parts_of(content, elements, self._replicas, total)
        if count == 1:
            return alone(parts[0])
        if count < total:
            # All processes must see from the shapes that replicas have different numbers of examples.
            pairs = zip(parts, self._replicas, strict=True)
            parts = [splitting.any_size(part) if number < count else splitting.empty(part) for part, number in pairs]
        return self._strategy.run(step, (values_of_replicas.of(parts),))

    def meet(self, is_ended: bool) -> bool:
        """Gives all replicas the state of the first one, unless they have it.

        Args:
          is_ended: whether this process is at the end of an epoch.

        Returns:
          Whether all go on where they are; if not, all end the epoch.
        """
        model = self._ahead
        if model is None:
            return True
        # Callbacks may have stopped the first one, who alone has seen the logs, in mid-epoch.
        word = {"begun": self._warmup.begun, "ended": is_ended, "stopped": bool(getattr(model, "stop_training", False))}
        words = [*self._agreement.gather(word, self._what).values()] if self._agreement else [word]
        variables = [variable for variable in one_replica.variables_of(model) if not copies.is_counter(variable)]
        copies.broadcast(variables, 0 in self._replicas, self._sum_over_workers)
        self._warmup.resume(words[0]["begun"])
        model.stop_training = any(word["stopped"] for word in words)
        self._ahead = None
        return is_ended or not any(word["ended"] for word in words)

    def _count_update(self) -> None:
        self._warmup.opened(self._is_first_of_epoch)
        self._is_first_of_epoch = False

    def _watch_epoch(self, model: keras.Model) -> None:
        if not self._warmup.is_over:
            epoch_logs.change_once(model, lambda logs, logs_of: self._end_epoch(model, logs, logs_of))

    def _end_epoch(self, model: keras.Model, logs: Any, logs_of: Callable[[Any], Any]) -> Any:
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


class _WarmupDataset(handles.CountedDataset):
    """A data set that begins with the phase.

    Args:
      engine: the engine.
      whole: see `WarmupEngine.distribute`.
      begin: begins a pass in the phase.
    """

    def __init__(self, engine: WarmupEngine, whole: Any, begin: Callable[[], Batches]) -> None:
        super().__init__(engine, whole, lambda: whole)
        self._begin = begin

    def begin(self) -> Batches:
        """Begins a pass in the phase, and counts it."""
        self.opened += 1
        return self._begin()

    @property
    def passes(self) -> int:
        """Number of iterators that were opened over the data, those that `whole` counts included."""
        return self.opened + getattr(self.whole, "passes", 0)

    @property
    def cardinality(self) -> Any:
        """See `DistributedDataset.cardinality`."""
        return self.whole.cardinality

    def raised_in_step(self) -> BaseException | None:
        """See `DistributedDataset.raised_in_step`."""
        return getattr(self.whole, "raised_in_step", lambda: None)()


class _Pass(handles.HandleIterator):
    """One pass of `fit` that begins in the phase."""

    def __init__(self, engine: WarmupEngine, dataset: _WarmupDataset, model: keras.Model) -> None:
        super().__init__()
        self._engine = engine
        self._dataset = dataset
        self._model = model
        self._batches: Batches | None = None
        self._rest: handles.HandleIterator | None = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._rest is None:
            # Not before the first handle is asked for: Keras makes iterators that it never uses.
            self._batches = self._batches or self._dataset.begin()
            found = self._engine.begin_update(self._dataset.whole, self._batches, self._model)
            if not isinstance(found, handles.HandleIterator):
                return found
            self._rest = found
        return self._rest.next_handle()
