# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy` with a policy: updates from the contributions of several workers.

How an update flows:

    Keras' loop (chief)          a worker's thread (chief)          the worker          the parameter servers
      step(): opens  ----------->  may it start?
                                   contribute ------------------->  reads its part
                                                                    of the batch  <-->  reads the variables
                                   arrive: does it count?           keeps the gradients
                                   push  ------------------------>  sends them  ----->  keep them
                                   deliver
      collect(): has N  <---------
      update  ------------------------------------------------------------------->  add up, apply
      logs  <---------------------------------------------------------------------

Only control traffic and the logs cross the chief. A late gradient is not sent: it stays on its worker.

Ownership: `RoundRunner` owns the policy and its lock. A worker's thread belongs to the coordinator, which detects the
loss of the worker. A closure of this engine *resides* in the thread, and returns it as soon as another function is
scheduled (an evaluation, for example). A handle to gradients belongs to its next user; no code waits for the handles of
a dead worker, or clears them.

An update is made exactly once: its contributions were pushed before it begins, each counts once, and it touches
parameter servers only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures, python_operation
from tfdist.compat.running_loop import Fit
from tfdist.data import epochs, splitting
from tfdist.engines.base import Engine
from tfdist.engines.parameter_server.aggregated_step import AggregatedStep, part_of
from tfdist.engines.parameter_server.asynchronous import AsynchronousEngine
from tfdist.engines.parameter_server.transfer.plan import TransferPlan
from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.engines.parameter_server.worker_pass import WorkerIterator, find_iterator
from tfdist.policies.base import Aggregation, Update
from tfdist.policies.warmup import Warmup
from tfdist.runtime import delay_hook, stalls
from tfdist.runtime.round_runner import RoundRunner
from tfdist.step import rehearsal, replica_placement


@dataclasses.dataclass(eq=False)
class _Residence:
    """Step that workers contribute to until another function is scheduled."""

    step: AggregatedStep
    iterator: WorkerIterator
    # If the chief reads the data: each worker's part of this update's batch, flat.
    parts: list[list[tf.Tensor]] | None = None


class AggregatedEngine(Engine):
    """Makes updates from the contributions that a policy accepts.

    Args:
      strategy: the strategy whose cluster it drives.
      engine: runs all functions but training steps on these workers.
      policy: decides which contributions count; `begin` was called.
      transfer: how variables and gradients cross the network.
      on_update: called with each update.
      stall_timeout_secs: longest wait for lost workers without which no update is possible.
      warmup: decides how many workers take part at first; all by default.
    """

    _runner_type = RoundRunner

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        engine: AsynchronousEngine,
        policy: Aggregation,
        transfer: TransferPlan,
        on_update: Callable[[Update], None],
        stall_timeout_secs: float,
        warmup: Warmup | None = None,
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self.num_workers = engine.num_workers
        self.coordinator = engine.coordinator
        self.data_service_address = engine.data_service_address
        self._on_update = on_update
        self._count = engine.num_workers
        # Each update needs a part of the batch from each worker, if the workers share the data.
        self.num_parts = self._count if engine.data_sharding == "shard" else 1
        names = [f"worker:{index}" for index in range(self._count)]
        self._policy = policy
        self._transfer = transfer
        self._runner = self._runner_type(policy, names, stall_timeout_secs)
        self._warmup = warmup
        self._updates = 0
        self._residence: _Residence | None = None
        self._attempts = [itertools.count() for _ in names]
        self._reporter = stalls.StallReporter(self._runner.waited_for)
        self._reporter.start()
        engine.before_queueing = self._leave
        engine.programs.accumulates = False
        closures.before_use(engine.coordinator, self._leave)

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`."""
        return self._engine.raised_in_step(error)

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients of the next update."""
        return self._policy.replicas_to_aggregate

    def follow_losses(self, on_loss: Callable[[int, bool], object]) -> None:
        """See `CoordinatedEngine.follow_losses`."""
        self._runner.on_loss = on_loss

    def distribute(self, dataset: tf.data.Dataset) -> WorkerDataset:
        """Returns a data set of handles, of whose batches each worker reads its part."""
        dataset, sharding = self._in_order(dataset), self._engine.data_sharding
        return WorkerDataset(self, dataset, "deal" if sharding == "shard" else sharding)

    def distribute_own(self, datasets: Sequence[tf.data.Dataset]) -> WorkerDataset:
        """Returns a data set of handles, from one data set per worker."""
        return WorkerDatasetFromFunction(self, datasets)

    def _in_order(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        dataset = self._engine.in_order(dataset)
        if self.num_parts > 1:
            splitting.check_batched(dataset.element_spec, self.num_parts)
        return dataset

    def open(self, dataset: WorkerDataset, fit: Fit | None) -> WorkerIterator:
        """Begins a pass over a data set, for any loop."""
        del fit
        return WorkerIterator(self._engine, dataset)

    def run(self, step: Callable[..., Any], handle: WorkerBatch) -> Any:
        """Makes an update from the contributions of several workers; in a graph or eagerly.

        Args:
          step: a model's bound `train_step`.
          handle: of a data set of this engine.

        Returns:
          The logs after the update.
        """
        traced = self._traced(step, handle)
        if tf.executing_eagerly():
            return traced.rebuild(self.step(traced, find_iterator(int(handle.content))))

        def update(number: tf.Tensor) -> list[np.ndarray]:
            return self.step(traced, find_iterator(int(number)))

        return traced.rebuild(python_operation.call(update, [handle.content], traced.dtypes))

    def _traced(self, step: Callable[..., Any], handle: WorkerBatch) -> AggregatedStep:
        steps, key = self._engine.programs.kept_for(step), (step, "step", handle.kind)
        if key not in steps:
            spec, count = handle.element_spec, self.num_parts
            rehearsal.before(self._strategy, step, [spec])
            replica_placement.check_step(self._strategy, step)
            steps[key] = self.prepare(step, splitting.part_spec(spec, count) if count > 1 else spec)
        return steps[key]

    def prepare(self, step: Callable[..., Any], element_spec: Any) -> AggregatedStep:
        """Traces a model's `train_step` for the workers' batches of this structure."""
        return AggregatedStep(
            self._strategy, step, self._transfer, element_spec, self._count, self.replicas_to_aggregate
        )

    def step(self, step: AggregatedStep, iterator: WorkerIterator) -> list[np.ndarray]:
        """Makes one update.

        Returns:
          The flat logs after it.

        Raises:
          tf.errors.OutOfRangeError: the data have ended.
          TimeoutError: too many workers were lost for `stall_timeout_secs`.
        """
        with self._reporter.waiting("an update"):
            is_chief_fed = iterator.feed(False) == "chief"
            parts = self._next_parts(iterator) if is_chief_fed else None
            if is_chief_fed:
                step.prepare_for_batches()
                iterator.redeem()
            iterator.begin_update()
            with self._phase(step):
                self._reside(step, iterator, parts)
                with self._runner.wanted():
                    contributions, update = self._collect(step, iterator, parts)
                logs = step.update(contributions)
                self._updates += 1
        self._on_update(update)
        return logs

    @contextlib.contextmanager
    def _phase(self, step: AggregatedStep) -> Iterator[None]:
        """Context of one update, in which only the workers of the warmup phase take part."""
        warmup = self._warmup
        if warmup is None or warmup.is_over:
            yield
            return
        counts_epochs = warmup.unit == "epochs"
        is_first = counts_epochs and epochs.is_first_step(step.model)
        self._runner.limit(warmup.taking_part_next(is_first))
        made = self._updates
        yield
        if self._updates > made:
            warmup.opened(is_first)
            if is_first:
                epochs.check_counts(step.model)

    def close(self) -> None:
        """Returns the workers' threads to the coordinator, and ends this engine's own thread; may be called again."""
        self._leave()
        self._reporter.stop()

    def _collect(self, step: AggregatedStep, iterator: WorkerIterator, parts: list[list[tf.Tensor]] | None) -> Any:
        def check() -> None:
            self._check()
            # Another thread of the program may have scheduled a function in the meantime.
            self._reside(step, iterator, parts)

        return self._runner.collect(check)

    def _check(self) -> None:
        if closures.has_failed(self._engine.coordinator):
            # The coordinator waits for all closures to end before it raises.
            self._leave()
            closures.raise_failure(self._engine.coordinator)
        for worker in closures.lost_workers(self._engine.coordinator):
            # It may have died in an evaluation, for example, which the runner doesn't see.
            self._lose(worker, lambda worker=worker: worker in closures.lost_workers(self._engine.coordinator))

    def _lose(self, worker: int, is_so: Callable[[], bool] = lambda: True) -> None:
        self._runner.lose(worker, is_so)

    def _next_parts(self, iterator: WorkerIterator) -> list[list[tf.Tensor]]:
        batch = iterator.next_local_batch()
        return [part_of(batch, iterator.element_spec, worker, self._count) for worker in range(self._count)]

    def _reside(self, step: AggregatedStep, iterator: WorkerIterator, parts: list[list[tf.Tensor]] | None) -> None:
        """Schedules the closures that contribute to these updates, unless they run already."""
        present = self._residence
        if present is not None and present.step is step and present.iterator is iterator:
            present.parts = parts
            return
        self._leave()
        residence = self._residence = _Residence(step, iterator, parts)
        on_workers = self._on_workers(iterator, parts)
        for _ in range(self._count):
            closures.schedule(self._engine.coordinator, self._serve, residence, on_workers)

    def _on_workers(self, iterator: WorkerIterator, parts: list[list[tf.Tensor]] | None) -> Any:
        """Returns the workers' iterators; None if the chief reads the data."""
        return iterator.on_workers() if parts is None else None

    def _leave(self) -> None:
        self._residence = None
        self._runner.wake()

    def _serve(self, residence: _Residence, iterator_on_worker: Any) -> None:
        """Contributes until another function is scheduled; runs in the thread of the closure's worker."""
        worker = closures.this_worker()
        for local_step in self._started(worker, residence):
            try:
                self._contribute(residence, worker, local_step, iterator_on_worker)
            except Exception as error:
                if closures.is_task_failure(error):
                    self._lose(worker)
                    raise
                # Errors of the user's step are raised to the user, with their type and message.
                closures.clear_error()
                is_end = isinstance(error, tf.errors.OutOfRangeError)
                residence.iterator.ended |= is_end
                self._runner.fail(worker, local_step, error, is_end)

    def _started(self, worker: int, residence: _Residence) -> Iterator[int]:
        """Yields the local step of each gradient that a worker starts, until another function is scheduled."""
        self._runner.bring_back(worker)
        while True:
            local_step = self._runner.start(worker, lambda: self._residence is not residence)
            if local_step is None:
                return
            yield local_step

    def _contribute(self, residence: _Residence, worker: int, local_step: int, iterator_on_worker: Any) -> None:
        parts = residence.parts
        delay_hook.before_contribution(worker, next(self._attempts[worker]))
        if parts is None:
            contribution = residence.step.contribute(iterator_on_worker)
        else:
            contribution = residence.step.contribute_from(parts[worker])
        if self._runner.arrive(worker, local_step):
            self._runner.deliver(worker, local_step, residence.step.push(contribution))
