# SPDX-License-Identifier: Apache-2.0
"""The engine of `MirroredStrategy` with a policy: each device computes in a thread of its own.

How an update flows:

    Keras' step                    a replica's thread, one for each device
      run(): opens   ----------->  may it start?
                                   contribute: takes its part of the batch, reads its device's variables, computes
                                   arrive: does it count?
      collect(): has N  <--------  deliver
      update: adds up, applies to every device's copy
      logs

A late replica continues to compute in its thread. It only reads variables, and its contribution is dropped; then it
starts again, with its part of the batch that is current by then.

Ownership: `RoundRunner` owns the policy and its lock. The engine owns the threads, which hold no reference to the
engine or the strategy, so that both can be garbage-collected: then the threads end.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.running_loop import Fit
from tfdist.data import replica_batches
from tfdist.data.handle import BatchHandle, registry
from tfdist.data.replica_batches import OwnParts, ReplicaIterator, WholeBatch
from tfdist.engines.base import Engine
from tfdist.engines.mirrored.step import ThreadedStep
from tfdist.policies.base import Aggregation, Update
from tfdist.runtime import delay_hook, stalls
from tfdist.runtime.round_runner import RoundRunner
from tfdist.step import replicated_step
from tfdist.step.step_calls import StepCalls

_CLOSING_SECS = 2.0


@dataclasses.dataclass(frozen=True)
class _Job:
    """Work of the replicas for one update: the step and its batch."""

    step: ThreadedStep
    batch: WholeBatch | OwnParts


class _Shared:
    """State that the engine shares with its threads."""

    def __init__(self, runner: RoundRunner) -> None:
        self.runner = runner
        # None between updates, because it references the model, and thereby the strategy.
        self.job: _Job | None = None
        self.is_closed = False


class ThreadedEngine(Engine):
    """Makes updates from the contributions of this process' devices that a policy accepts.

    Args:
      strategy: the strategy whose devices compute.
      policy: decides which contributions count; `begin` was called.
      names: names of the replicas, such as "worker:0".
      on_update: called with each update and its number of examples; it must not reference the strategy.
      stall_timeout_secs: longest wait of an update without progress of any replica.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        policy: Aggregation,
        names: Sequence[str],
        on_update: Callable[[Update, int], None],
        stall_timeout_secs: float,
    ) -> None:
        self._policy = policy
        self._on_update = on_update
        self._shared = _Shared(RoundRunner(policy, names, stall_timeout_secs))
        self._reporter = stalls.StallReporter(self._shared.runner.waited_for)
        self._threads = [
            threading.Thread(target=_serve, args=(self._shared, replica), name=f"tfdist {name}", daemon=True)
            for replica, name in enumerate(names)
        ]
        self._is_started = False
        self._strategy = weakref.ref(strategy)
        self._calls = StepCalls(self.trace, self._step)
        # Called by `close`, when the engine is collected, or at the end of the process.
        self._end_threads = weakref.finalize(self, _close, self._shared, self._reporter, self._threads)

    def distribute(self, dataset: tf.data.Dataset) -> replica_batches.ReplicaDataset:
        """Returns a data set of handles whose global batches are divided among the devices."""
        return replica_batches.ReplicaDataset(self, dataset, len(self._threads))

    def distribute_own(self, datasets: Sequence[tf.data.Dataset]) -> replica_batches.ReplicaDataset:
        """Returns a data set of handles, from one data set per device, which the device's thread reads."""
        return replica_batches.ReplicaDatasetFromFunction(self, datasets)

    def open(self, dataset: replica_batches.ReplicaDataset, fit: Fit | None) -> ReplicaIterator:
        """Opens a pass over a data set, for any loop."""
        del fit
        return dataset.iterate()

    def run(self, step: Callable[..., Any], handle: BatchHandle) -> Any:
        """Makes an update from the batch that a handle stands for; in a graph or eagerly.

        Args:
          step: a model's bound `train_step`.
          handle: of a data set of this engine.

        Returns:
          The step's result for all devices together.

        Raises:
          Exception: the exception of a replica.
          TimeoutError: no replica made progress for `stall_timeout_secs`.
        """
        traced, flat = self._calls.run(step, handle)
        return traced.rebuild(flat)

    def batch(self, handle: BatchHandle) -> Any:
        """Returns the batch of a handle, as distributed values."""
        return replica_batches.distributed(handle)

    def example(self, handle: BatchHandle) -> Any:
        """Returns a replica's part of the batch, or a part with the same spec."""
        return registry.find(handle.content).example()

    def close(self) -> None:
        """Ends the threads; may be called again."""
        self._end_threads()

    def trace(self, step: Callable[..., Any], handle: BatchHandle) -> ThreadedStep:
        """Traces a model's `train_step` for batches like this one."""
        strategy, model = self._strategy(), getattr(step, "__self__")  # noqa: B009
        _check_xla(model)
        replicated_step.prepare(strategy, model)
        _, is_whole = handle.kind.form
        traced = ThreadedStep(strategy, step, handle.kind.element_spec, is_whole)
        traced.prepare(self._policy.replicas_to_aggregate)
        return traced

    def _step(self, step: ThreadedStep, iterator: ReplicaIterator) -> list[np.ndarray]:
        """Makes one update from the iterator's next batch; returns the flat logs after it."""
        self._start()
        shared = self._shared
        batch = iterator.take()
        with self._reporter.waiting("an update"):
            shared.job = _Job(step, batch)
            try:
                with shared.runner.wanted():
                    # While the replicas compute.
                    iterator.read_ahead()
                    contributions, update = shared.runner.collect()
            finally:
                shared.job = None
            in_order = sorted(zip(update.contributors, contributions, strict=True), key=lambda pair: pair[0])
            logs = step.update([contribution for _, contribution in in_order])
        self._on_update(update, sum(batch.rows(replica) for replica in update.contributors))
        return logs

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._reporter.start()
            for thread in self._threads:
                thread.start()


def _check_xla(model: Any) -> None:
    if model.jit_compile:
        raise ValueError(
            "compile(jit_compile=True): XLA can't compile a step that a policy takes apart; leave it at 'auto' or "
            "False. Received: jit_compile=True"
        )


def _serve(shared: _Shared, replica: int) -> None:
    """Contributes until the engine is closed; runs in a replica's thread."""
    attempt = 0
    while True:
        local_step = shared.runner.start(replica, lambda: shared.is_closed)
        if local_step is None:
            return
        job = shared.job
        try:
            if job is not None:
                _contribute(shared.runner, job, replica, local_step, attempt)
        except Exception as error:
            # Errors of the user's step are raised to the user.
            shared.runner.fail(replica, local_step, error, isinstance(error, tf.errors.OutOfRangeError))
        else:
            if job is None:
                shared.runner.give_up(replica)
        attempt += 1
        del job


def _contribute(runner: RoundRunner, job: _Job, replica: int, local_step: int, attempt: int) -> None:
    delay_hook.before_contribution(replica, attempt)
    contribution = job.step.contribute(replica, job.batch.flat(replica))
    if runner.arrive(replica, local_step):
        runner.deliver(replica, local_step, contribution)


def _close(shared: _Shared, reporter: stalls.StallReporter, threads: Sequence[threading.Thread]) -> None:
    shared.is_closed = True
    shared.runner.wake()
    reporter.stop()
    # A thread that returns from TensorFlow after Python has ended aborts the process.
    deadline = time.monotonic() + _CLOSING_SECS
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
