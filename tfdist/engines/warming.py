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
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engines import alone, fitting, sharing
from tfdist.engines.warming_data import Part, Source, Turn, WarmingDataset
from tfdist.policies.base import Update
from tfdist.policies.warmup import Warmup

# How much is packed into one collective.
_CHUNK_BYTES = 2**26
# Of a Keras model: what `fit` calls at the end of each epoch, and at the beginning.
_END, _BEGIN = "_get_metrics_result_or_logs", "reset_metrics"

Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Company:
    """Where this process stands among those that train together.

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


class Warming:
    """Leads `fit` through the phase.

    Args:
      strategy: the strategy; its first device here has the first copies.
      warmup: says who takes part; `begin` was called.
      company: the other processes.
      prepare: checks and builds what must be there before a model's step is traced.
      record: told of each update of the phase, and of how many examples it was made (0 if that is not known).
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        warmup: Warmup,
        company: Company,
        prepare: Callable[[keras.Model], None],
        record: Callable[[Update, int], None],
    ) -> None:
        self._device: str = strategy.extended.worker_devices[0]
        self._warmup = warmup
        self._company = company
        self._prepare = prepare
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
    def is_ahead(self) -> bool:
        """Whether the first replica has trained alone since it gave its state to all; the same in all processes."""
        return self._is_ahead

    @property
    def num_taking_part(self) -> int:
        """How many replicas took part in the last update; 1 before the first."""
        return self._warmup.num_taking_part

    @property
    def replicas(self) -> Sequence[int]:
        """The numbers of this process' replicas."""
        return self._company.replicas

    def dataset(self, whole: Any, open_source: Callable[[], Source]) -> Any:
        """A data set that begins with the phase; see `WarmingDataset`."""
        return whole if self.is_over else WarmingDataset(self, whole, open_source)

    def is_over_now(self) -> bool:
        """Whether a pass that begins now has all replicas in it from the start."""
        is_level = not self.is_over and not self._is_ahead and self._is_first_of_epoch
        if is_level and self._warmup.taking_part_next(True) == self._warmup.total_num_replicas:
            self._open()
        return self.is_over

    def go_on_in_epoch(self) -> None:
        """Says that `fit` begins in the middle of an epoch."""
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

    def turn(self, count: int, source: Source) -> Turn:
        """What this process does in an update in which so many replicas, but not all, take part."""
        self._record(_update(self._warmup.begun, count), count * (sharing.static_size(source.part_spec) or 0))
        if count > 1:
            part = Part("together", tuple(replica < count for replica in self._company.replicas))
            return Turn.of(part, source.part_spec, source.take())
        if 0 in self._company.replicas:
            return source.alone()
        source.pass_by()
        return Turn.of(Part("idle"), source.part_spec, [])

    def run(self, step: Callable[..., Any], turn: Turn, run_all: Callable[..., Any]) -> Any:
        """Does what a turn says; in a graph, or eagerly.

        Args:
          step: a bound `train_step`.
          turn: the turn.
          run_all: the strategy's `run` without a warmup.

        Returns:
          What the step returns; for one that waits, zeros.
        """
        if turn.part.kind == "together":
            return run_all(step, (turn.batch(),))
        model: keras.Model = step.__self__  # type: ignore[attr-defined]
        self._prepare(model)
        if turn.part.kind == "idle":
            return alone.outputs_of(step, model, self._device, turn.part_spec)
        part = turn.own_part()
        with alone.alone(model, self._device):
            logs = step(alone.without_optionals(part))
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
        words = self._company.exchange({"begun": self._warmup.begun, "ended": is_ended, "stopped": is_stopped})
        self._company.give([v for v in alone.variables_of(model) if not alone.is_counter(v)])
        self._warmup.resume(words[0]["begun"])
        model.stop_training = any(word["stopped"] for word in words)
        self._is_ahead = False
        return is_ended or not any(word["ended"] for word in words)

    def settle(self) -> None:
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
        ended, begun = getattr(model, _END), getattr(model, _BEGIN)

        def end(logs: Any) -> Any:
            return self._epoch_logs(model, ended, logs) if _is_called_by_fit() else ended(logs)

        def begin() -> None:
            self._is_first_of_epoch = self._is_first_of_epoch or _is_called_by_fit()
            begun()

        # Past Keras' own __setattr__, which tracks values.
        object.__setattr__(model, _END, end)
        object.__setattr__(model, _BEGIN, begin)

    def _unfollow(self) -> None:
        model = self._model()
        for name in (_END, _BEGIN):
            if name in getattr(model, "__dict__", {}):
                object.__delattr__(model, name)
        self._model = lambda: None

    def _epoch_logs(self, model: keras.Model, logs_of: Callable[[Any], Any], logs: Any) -> Any:
        self.meet(model, is_ended=True)
        found = logs_of(logs)
        # The metrics' counts add up over all replicas; other logs only the first one has.
        if found is logs and self._was_alone:
            found = self._company.from_first(
                lambda: tf.nest.map_structure(lambda leaf: np.asarray(leaf).tolist(), logs)
            )
        self._was_alone = False
        return found


def give_copies(variables: Sequence[Any]) -> None:
    """Gives all copies in this process the first one's value."""
    for variable in variables:
        first, *others = alone.copies_of(variable)
        for copy in others:
            copy.assign(first)


def give_over_workers(variables: Sequence[Any], is_first: bool, sum_over_workers: Sum) -> None:
    """Gives all workers, of one copy each, the first one's values."""
    for chunk in _chunks([alone.copies_of(variable)[0] for variable in variables]):
        own = [_summable(copy) for copy in chunk]
        sums = sum_over_workers(own if is_first else [tf.zeros_like(value) for value in own])
        # The first one too: what it adds to zero may come out as another zero.
        for copy, value in zip(chunk, sums, strict=True):
            copy.assign(tf.cast(value, copy.dtype))


def _summable(copy: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(copy)
    # Collectives add no unsigned integers and no booleans.
    return value if value.dtype.is_floating or value.dtype.is_complex else tf.cast(value, tf.int64)


def _chunks(copies: Sequence[Any]) -> list[list[Any]]:
    chunks, size = [[]], 0
    for copy in copies:
        num_bytes = copy.shape.num_elements() * copy.dtype.size
        if chunks[-1] and size + num_bytes > _CHUNK_BYTES:
            chunks, size = [*chunks, []], 0
        chunks[-1].append(copy)
        size += num_bytes
    return [chunk for chunk in chunks if chunk]


def _is_called_by_fit() -> bool:
    return sys._getframe(2).f_code is fitting.FIT


def _update(step: int, count: int) -> Update:
    return Update(step, tuple(range(count)), (), (0,) * count, 0.0, 0.0, ())
