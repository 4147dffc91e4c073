# SPDX-License-Identifier: Apache-2.0
"""The warmup phase of the mirrored strategies: the first replica trains alone, and then gives all what it has learned.

How an update of the phase flows, on the process of the first replica and on another one:

    next(iterator): a turn to train alone              a turn to wait
    train_step on one part of the batch, as one        nothing: the logs are zeros
    device would, on the first copy of the variables
    ...                                                ...
    the epoch ends, or the phase does: `meet`  <---->  `meet`: waits, however long that takes
    gives its variables  --------------------------->  takes them

So processes that wait run through the steps of the phase at once, and then wait, alive, where all need the same state:
at the end of each epoch, before metrics are read, the model is evaluated and callbacks decide.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import epoch_logs, own_attributes, running_loop
from tfdist.data import handle as handles
from tfdist.data import splitting
from tfdist.engines.warmup import data as warmup_data
from tfdist.engines.warmup.data import Source
from tfdist.policies.base import Update
from tfdist.policies.saved_state import SavedState
from tfdist.policies.warmup import Warmup
from tfdist.step import copies, one_replica, replicated_step

# Forms of handles: the first replica trains by itself, here on a part or on what the step reads, or elsewhere. Else a
# tuple: which replicas of this process take part, with no example for those that don't; empty if all do everywhere.
_ALONE, _READING, _IDLE = "alone", "reading", "idle"
# Of a Keras model: what `fit` calls at the beginning of each epoch.
_BEGIN = "reset_metrics"


@dataclasses.dataclass(frozen=True)
class Peers:
    """The processes that train together, as this one sees them.

    Attributes:
      replicas: the numbers of this process' replicas.
      exchange: gives this process' word (JSON data) to all, and returns the words of all, the first replica's first.
      from_first: what the function returns on the process of the first replica (JSON data); called there only.
      give: gives all replicas the first one's values of these Keras variables.
    """

    replicas: Sequence[int]
    exchange: Callable[[dict[str, Any]], list[dict[str, Any]]]
    from_first: Callable[[Callable[[], Any]], Any]
    give: Callable[[Sequence[Any]], None]


class WarmupEngine(SavedState):
    """Leads `fit` through the phase.

    Args:
      strategy: the strategy; its first device here has the first copies.
      warmup: says who takes part; `begin` was called.
      peers: the other processes.
      record: told of each update of the phase, and of how many examples it was made (0 if that is not known).
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        warmup: Warmup,
        peers: Peers,
        record: Callable[[Update, int], None],
    ) -> None:
        self._strategy = strategy
        self._device: str = strategy.extended.worker_devices[0]
        self._warmup = warmup
        self._peers = peers
        self._record = record
        self._model: Callable[[], keras.Model | None] = lambda: None
        self._is_first_of_epoch = True
        self._goes_on_in_epoch = False
        # Whether the first replica has trained since it gave its state to all; the same in all processes.
        self._is_ahead = False
        self._was_alone = False

    @property
    def is_over(self) -> bool:
        """Whether all replicas took part in the last update."""
        return self._warmup.is_over

    @property
    def is_chief_ahead(self) -> bool:
        """Whether the first replica has trained alone since it gave its state to all; the same in all processes."""
        return self._is_ahead

    @property
    def num_taking_part(self) -> int:
        """How many replicas took part in the last update; 1 before the first."""
        return self._warmup.num_taking_part

    @property
    def replicas(self) -> Sequence[int]:
        """The numbers of this process' replicas."""
        return self._peers.replicas

    def distribute(self, whole: Any, open_source: Callable[[], Source]) -> Any:
        """A data set that begins with the phase.

        Args:
          whole: the same data set as the strategy distributes it without a warmup; for all but `fit`.
          open_source: begins a pass in the phase.
        """
        return whole if self.is_over or not tf.executing_eagerly() else _WarmupDataset(self, whole, open_source)

    def open(self, dataset: _WarmupDataset, fit: running_loop.Fit | None) -> _WarmupIterator | None:
        """Opens a pass of `fit` that begins in the phase."""
        if fit is None:
            self.share_state()
            return None
        if self.is_over_now():
            dataset.begun += 1
            return None
        return _WarmupIterator(self, dataset.open_source, fit.model)

    def is_over_now(self) -> bool:
        """Whether a pass that begins now has all replicas in it from the start."""
        is_level = not self.is_over and not self._is_ahead and self._is_first_of_epoch
        if is_level and self._warmup.taking_part_next(True) == self._warmup.total_num_replicas:
            self._open()
        return self.is_over

    def take(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """See `SavedState.take`."""
        if is_in_epoch:
            self._is_first_of_epoch, self._goes_on_in_epoch = False, True

    # In Keras' loop.

    def opened(self, model: keras.Model, source: Source) -> int:
        """Keras asks for another update.

        Returns:
          How many replicas take part in it; 0 at the end of the data.
        """
        self._follow(model)
        count = self._warmup.taking_part_next(self._is_first_of_epoch)
        is_rest = count == self._warmup.total_num_replicas
        # Where some have to catch up, the end of the data is the end of an epoch, where all meet.
        ask = source.has_next if count == 1 or self._is_ahead else source.have_all_next
        is_next = ask(is_rest)
        if not is_next or (count > 1 and not self.meet(model, is_ended=False)):
            return 0
        self._open()
        self._was_alone = count == 1
        self._is_ahead = count == 1
        return count

    def handle(self, count: int, source: Source) -> handles.BatchHandle:
        """A handle for an update in which so many replicas take part, but not all."""
        self._record(_update(self._warmup.begun, count), count * (splitting.static_size(source.part_spec) or 0))
        if count > 1:
            return self.together(source, tuple(replica < count for replica in self._peers.replicas))
        if 0 in self._peers.replicas:
            content = source.alone()
            if isinstance(content, tf.data.Iterator):
                return self._handle(source, _READING, content, lambda: tf.type_spec_from_value(content))
            return self._handle(source, _ALONE, content, lambda: source.part_spec)
        source.skip()
        return self._handle(source, _IDLE, (), lambda: ())

    def together(self, source: Source, taking_part: tuple[bool, ...] = ()) -> handles.BatchHandle:
        """A handle for an update in which these replicas of this process take part; by default all do everywhere."""
        parts = source.take()
        return self._handle(source, taking_part, parts, lambda: [source.part_spec] * len(parts))

    def _handle(self, source: Source, form: Any, content: Any, spec: Callable[[], Any]) -> handles.BatchHandle:
        # Each kind is looked up once in a pass: this is on the way of every step.
        if form not in source.kinds:
            source.kinds[form] = handles.registry.kind(self, source.part_spec, form, spec())
        return source.kinds[form].handle(content)

    def run(self, step: Callable[..., Any], handle: handles.BatchHandle) -> Any:
        """Does what a handle says; in a graph, or eagerly.

        Args:
          step: a bound `train_step`.
          handle: of a data set of this engine.

        Returns:
          What the step returns; for one that waits, zeros.
        """
        form, content = handle.kind.form, handle.content
        if isinstance(form, tuple):
            return self._strategy.run(step, (warmup_data.batch_of(content, form),))
        model: keras.Model = getattr(step, "__self__")  # noqa: B009
        replicated_step.check_xla(self._strategy, model)
        replicated_step.prepare(self._strategy, model)
        if form == _IDLE:
            return one_replica.outputs_of(step, model, self._device, handle.kind.element_spec)
        # The first of a batch's parts, or of a pair of a part and a number of examples.
        part = content.get_next()[0] if form == _READING else content
        with one_replica.alone(model, self._device):
            logs = step(handles.without_optionals(part))
            return tf.nest.map_structure(tf.convert_to_tensor, logs)

    # Where all meet.

    def meet(self, model: keras.Model, is_ended: bool) -> bool:
        """Gives all replicas the state of the first one, unless they have it.

        Args:
          model: what is trained.
          is_ended: whether this process is at the end of an epoch.

        Returns:
          Whether all go on where they are; if not, all end the epoch.
        """
        if not self._is_ahead:
            return True
        # Callbacks may have stopped the first one, who alone has seen the logs, in mid-epoch.
        is_stopped = bool(getattr(model, "stop_training", False))
        words = self._peers.exchange({"begun": self._warmup.begun, "ended": is_ended, "stopped": is_stopped})
        self._peers.give([v for v in one_replica.variables_of(model) if not copies.is_counter(v)])
        self._warmup.resume(words[0]["begun"])
        model.stop_training = any(word["stopped"] for word in words)
        self._is_ahead = False
        return is_ended or not any(word["ended"] for word in words)

    def share_state(self) -> None:
        """The same for the model that was trained last, before anything else is done with it."""
        model = self._model()
        if model is not None:
            self.meet(model, is_ended=True)

    def _open(self) -> None:
        self._warmup.opened(self._is_first_of_epoch)
        self._is_first_of_epoch = False
        if self.is_over:
            self._unfollow()

    def _follow(self, model: keras.Model) -> None:
        """Has the model tell when an epoch begins and ends: `fit` tells a strategy nothing of epochs."""
        if self._model() is model:
            return
        self._unfollow()
        self._model = weakref.ref(model)
        self._is_first_of_epoch, self._goes_on_in_epoch = not self._goes_on_in_epoch, False
        ended, begun = epoch_logs.of(model), getattr(model, _BEGIN)

        def end(logs: Any) -> Any:
            return self._epoch_logs(model, ended, logs) if running_loop.is_called_by_fit() else ended(logs)

        def begin() -> None:
            self._is_first_of_epoch = self._is_first_of_epoch or running_loop.is_called_by_fit()
            begun()

        epoch_logs.put(model, end)
        own_attributes.put(model, _BEGIN, begin)

    def _unfollow(self) -> None:
        model = self._model()
        if model is not None:
            epoch_logs.remove(model)
            if own_attributes.of(model, _BEGIN) is not None:
                own_attributes.remove(model, _BEGIN)
        self._model = lambda: None

    def _epoch_logs(self, model: keras.Model, logs_of: Callable[[Any], Any], logs: Any) -> Any:
        self.meet(model, is_ended=True)
        found = logs_of(logs)
        # The metrics' counts add up over all replicas; other logs only the first one has.
        if found is logs and self._was_alone:
            found = self._peers.from_first(lambda: tf.nest.map_structure(lambda leaf: np.asarray(leaf).tolist(), logs))
        self._was_alone = False
        return found


class _WarmupDataset(handles.CountedDataset):
    """A data set of a strategy with a warmup phase; for the arguments see `WarmupEngine.distribute`."""

    def __init__(self, engine: WarmupEngine, whole: Any, open_source: Callable[[], Source]) -> None:
        super().__init__(engine, whole, lambda: whole)
        self._open_source = open_source
        # How many iterators were made of `whole`, where that does not say so.
        self.begun = 0

    @property
    def passes(self) -> int:
        """How many iterators over the data were made."""
        return self.opened + getattr(self.whole, "passes", self.begun)

    @property
    def cardinality(self) -> Any:
        """See `DistributedDataset.cardinality`."""
        return self.whole.cardinality

    def raised_in_step(self) -> BaseException | None:
        """See `DistributedDataset.raised_in_step`."""
        return getattr(self.whole, "raised_in_step", lambda: None)()

    def open_source(self) -> Source:
        """Begins a pass in the phase."""
        source = self._open_source()
        # A `ReplicaDataset` counts its passes itself.
        self.opened += not isinstance(source, warmup_data.ReplicaSource)
        return source


class _WarmupIterator(handles.HandleIterator):
    """One pass of `fit` that begins in the phase."""

    def __init__(self, engine: WarmupEngine, open_source: Callable[[], Source], model: keras.Model) -> None:
        super().__init__()
        self._engine = engine
        self._open = open_source
        self._model = model
        self._source: Source | None = None
        self._rest: Any = None

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._rest is not None:
            return self._rest.next_handle()
        # Not before the first handle is asked for: Keras makes iterators that it never uses.
        source = self._source = self._source or self._open()
        count = self._engine.opened(self._model, source)
        if not count:
            return None
        if not self._engine.is_over:
            return self._engine.handle(count, source)
        self._rest = source.rest() or _Synchronous(self._engine, source)
        return self._rest.next_handle()


@dataclasses.dataclass(frozen=True)
class _Synchronous:
    """The rest of a pass in which all replicas take part in each update."""

    engine: WarmupEngine
    source: Source

    def next_handle(self) -> handles.BatchHandle | None:
        return self.engine.together(self.source) if self.source.have_all_next(is_rest=True) else None


def _update(step: int, count: int) -> Update:
    return Update(step, tuple(range(count)), (), (0,) * count, 0.0, 0.0, ())
