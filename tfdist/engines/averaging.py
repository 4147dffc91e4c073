# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterAveraging`: each replica trains alone, and all average every H steps.

How a period flows, on each worker:

    Keras' train function                             Keras' thread
      step 1      each replica updates its own copies
      ...         of the variables; nothing is sent
      step H      the same, then one sum over all
                  replicas: their mean is what all
                  go on from
      ...
      step H + 3  the end of the epoch, say  -------> what was begun is averaged before validation, a callback, or
                                                      anybody who saves the model can look

Both averages are made by the same graph, on all workers at the same place of the program: no agreement is needed.

Who owns what: an `Average` belongs to a model and owns what is counted and what is averaged. The engine knows which
model trains now. A callback of its own, the first of each `fit`, stands where Keras passes between two steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import calls, optimizers, saving
from tfdist.compat.keras.calls import Call
from tfdist.compat.tensorflow import inputs
from tfdist.engines.averaging_step import Average, Count
from tfdist.engines.base import Engine
from tfdist.passes import splitting
from tfdist.passes.handle import DistributedDataset
from tfdist.passes.shares import ReplicaPart, Sum
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.step import replicas, step_times, trials
from tfdist.step.step import Step

_AVERAGE = "_tfdist_average"


class AveragingEngine(Engine):
    """Makes the steps of this worker's replicas, and averages.

    Args:
      strategy: the strategy.
      policy: says when to average, and what.
      replicas: which parts of a batch this worker's replicas take.
      sum_over_workers: sums tensors over all workers, in cross-replica context.
      times: takes the times of the steps.
      sum_differences: see `averaging_step.Average`.
    """

    def __init__(
        self,
        strategy: Any,
        policy: ParameterAveraging,
        replicas: Sequence[int],
        sum_over_workers: Sum,
        times: step_times.StepClock,
        sum_differences: Callable[[], optimizers.SumGradients | None] | None = None,
    ) -> None:
        self._strategy = strategy
        self._replicas = tuple(replicas)
        self._times = times
        # The model follows.
        self._make_average = functools.partial(Average, strategy, policy, sum_over_workers, times, sum_differences)
        self._model: keras.Model | None = None
        # The models of each `fit` that has raised, until their replicas are alike again.
        self._interrupted: list[keras.Model] = []
        self._counts: list[Count] = []
        saving.before_saves(self._before_save)

    # Called by the strategy.

    def distribute(self, dataset: Any, whole: Callable[[], Any]) -> DistributedDataset:
        """A data set of global batches, for `fit` and for others; `whole` makes the stock one."""
        splitting.check_batched(dataset.element_spec, self._strategy.num_replicas_in_sync)
        return DistributedDataset(self, step_times.timed(dataset), whole)

    def distribute_own(self, dataset: Any, whole: Callable[[], Any]) -> DistributedDataset:
        """The same from a data set of this worker's own."""
        own = inputs.mapped_inline(splitting.groups_of(dataset, len(self._replicas)), lambda *parts: Own(parts))
        return DistributedDataset(self, step_times.timed(own), whole)

    def open(self, dataset: DistributedDataset, fit: Call | None) -> Any:
        """Opens a pass of `fit` over a data set; averages first what was begun, also by an interrupted `fit`."""
        self.synchronize()
        if fit is not None:
            self._attend(fit)
        return self._times.open(dataset, fit)

    def run(self, step: Step, handle: step_times.Timed) -> Any:
        """Makes a step alone, and averages if it is time; in cross-replica context, in a graph or eagerly.

        Args:
          step: a model's `train_step`; the model and its optimizers were built.
          handle: an element of a data set of this engine.

        Returns:
          The logs: the same on all workers.
        """
        with replicas.writes_after_inputs(dict.fromkeys(self._strategy.extended.worker_devices, handle)):
            average, parts = self._average_of(step.model), self._parts(handle.given)
            sums = trials.sums_in(self._strategy, step, parts[0].batch, self._strategy.num_replicas_in_sync)
            return average.step(step, parts, self._times.begin(tf.stack([handle.called, handle.got])), sums)

    def _parts(self, given: Any) -> list[ReplicaPart]:
        """The parts that the replicas of this worker train on, of a batch or `Own`."""
        num_replicas = self._strategy.num_replicas_in_sync
        if not isinstance(given, Own):
            with tf.device("/device:CPU:0"):
                total = splitting.rows(given)
                return [ReplicaPart(splitting.cut(given, replica, num_replicas), total) for replica in self._replicas]
        rows = [splitting.rows(batch) for batch in given.parts]
        is_all = len(rows) == num_replicas and None not in rows
        return [ReplicaPart(batch, tf.add_n(rows) if is_all else None) for batch in given.parts]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent for averages so far; as many as each other one."""
        return sum(int(count.bytes_sent.numpy()) for count in self._counts)

    def complete(self, report: Any) -> Any:
        """A `tfdist.telemetry.Report`, and the steps since the last average, or whose times are not kept."""
        steps = sum(int(count.steps.numpy()) for count in self._counts) - self._times.recorded
        # Each replica's steps use its own gradients, which are never stale.
        own = {0: report.staleness.get(0, 0) + steps * len(report.accepted)} if steps else {}
        return dataclasses.replace(
            report,
            updates=report.updates + steps,
            accepted={name: count + steps for name, count in report.accepted.items()},
            staleness=report.staleness | own,
        )

    # Between steps, in Keras' thread.

    def _attend(self, fit: Call) -> None:
        callbacks = fit.callbacks
        if not any(isinstance(callback, _Settling) for callback in callbacks.callbacks):
            model = fit.model
            fit.ends.append(lambda error: self._note_interrupted(model))
            if calls.is_within_fit(fit):
                # The outer one goes on, also with the same iterator.
                fit.after.append(functools.partial(setattr, self, "_model", self._model))
            settling = _Settling(self)
            settling.set_model(fit.model)
            settling.set_params(callbacks.params)
            # Before callbacks that look at the model. A list of its own: somebody may be going through the one that
            # there is.
            callbacks.callbacks = [settling, *callbacks.callbacks]
        self._model = fit.model

    def _note_interrupted(self, model: keras.Model) -> None:
        # Not after `finish`, as where `on_train_end` of a callback raises.
        self._interrupted += [model] if self._model is model else []

    @property
    def is_synchronized(self) -> bool:
        """True if the last step ended with an average."""
        average = self._current()
        return average is None or average.is_synchronized

    def synchronize(self) -> None:
        """Averages what was begun; nothing if nothing was. All workers call it at the same place."""
        for model in {id(each): each for each in (*self._interrupted, self._model)}.values():
            average, is_interrupted = getattr(model, _AVERAGE, None), model in self._interrupted
            if average is not None:
                with self._strategy.scope():
                    average.synchronize(is_interrupted)
                    if is_interrupted:
                        average.finish()
            self._interrupted = [each for each in self._interrupted if each is not model]

    def _before_save(self, model: keras.Model) -> None:
        # All workers must take part anyway.
        if model is self._model or model in self._interrupted:
            self.synchronize()

    def variables(self, model: keras.Model) -> list[Any]:
        """The Keras variables that the averages of this model depend on, besides its own and its optimizers'."""
        with self._strategy.scope():
            return self._average_of(model).variables

    def finish(self) -> None:
        """Brings the replicas together for good, also where their optimizers kept what is theirs."""
        self.synchronize()
        average = self._current()
        if average is not None:
            with self._strategy.scope():
                average.finish()
        # All replicas are alike: nothing of the model is needed any more.
        self._model = None

    def shown(self) -> dict[str, float]:
        """The logs of the last average that no metric keeps."""
        average = self._current()
        return average.shown() if average else {}

    def _current(self) -> Average | None:
        return getattr(self._model, _AVERAGE, None)

    def _average_of(self, model: keras.Model) -> Average:
        average = getattr(model, _AVERAGE, None)
        if average is None or not average.is_of(optimizers.optimizers_of(model)):
            average = self._make_average(model)
            self._counts.append(average.count)
            patching.put(model, _AVERAGE, average)
        return average


class _Settling(keras.callbacks.Callback):
    """Averages before anything else reads the model, so that other callbacks see averages only."""

    def __init__(self, engine: AveragingEngine) -> None:
        super().__init__()
        self._engine = engine

    def on_test_begin(self, logs: Any = None) -> None:
        """Before Keras resets the metrics, which the average adds up."""
        self._engine.synchronize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages, and tells those after it what the logs are now."""
        self._engine.synchronize()
        shown = self._engine.shown()
        if logs is not None and shown and not shown.keys() <= self.model.get_metrics_result().keys():
            logs.update({name: value for name, value in shown.items() if name in logs})

    def on_train_end(self, logs: Any = None) -> None:
        """Averages before others look at the trained model."""
        self._engine.finish()


# The data of a strategy whose replicas train alone: `fit` reads them without asking anybody.
#
# In `fit` every worker iterates over whole batches, of which each replica takes its part in the step. Or it iterates
# over the parts of its own replicas. The iterator is tf.data's.


class Own(NamedTuple):
    """Parts that the replicas of a worker read of data of its own, in place of a whole batch.

    Attributes:
      parts: one for each replica of this worker.
    """

    parts: tuple[Any, ...]
