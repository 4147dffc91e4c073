# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy`: each step is a closure of TensorFlow's `ClusterCoordinator`.

How a step flows:

    Keras' loop (chief, main thread)    a worker's thread (chief)       the worker's process
      next(iterator)  make_room():
                      waits until fewer
                      than `window` steps
                      are under way
      strategy.run    step(): queues a
                      closure        -->  takes the next closure,   -->  the traced step: reads its batch
                      and returns         runs its Program               and the variables, updates the
                      the newest logs     on its worker             <--  variables (on the parameter servers)
      metric.result() barrier(): waits
                      for all steps,
                      then reads

The main thread owns the order of steps, and each worker's thread owns the calls of its worker. They share `step_queue`.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures
from tfdist.engines.parameter_server.pending_step import Step
from tfdist.engines.parameter_server.program import Program
from tfdist.engines.parameter_server.step_queue import StepQueue
from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_data import Batch, WorkerIterator
from tfdist.engines.parameter_server.worker_dataset import WorkerDataset
from tfdist.policies.base import Update
from tfdist.runtime import stalls


class CoordinatedEngine:
    """Keeps a bounded window of steps in flight over all workers.

    Args:
      strategy: The strategy whose cluster it drives.
      num_workers: Number of workers in the cluster.
      data_service_address: Returns the address of the tf.data service's dispatcher, "grpc://host:port", and starts it
        if needed; called with True if the data are endless.
      clock: Returns seconds, monotonic; replaced in tests.
      stall_timeout_secs: Longest time without a completed step, after which a wait raises an error.
      on_update: Called with each `Update`: its worker, and its staleness. An update counts when its result arrives at
        the chief.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        num_workers: int,
        data_service_address: Callable[[bool], str],
        clock: Callable[[], float] = time.monotonic,
        stall_timeout_secs: float = 600.0,
        on_update: Callable[[Update], object] = lambda update: None,
    ):
        self.num_workers = num_workers
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.data_service_address = data_service_address
        # Each worker computes one step while the next one waits in the queue; more would only make the logs older.
        self.window = 2 * num_workers + 1
        # Called before a step is queued; another engine that occupies the workers' threads returns them then.
        self.before_queueing: Callable[[], None] = lambda: None
        self._queue = StepQueue(self.coordinator, num_workers, clock, stall_timeout_secs, on_update)
        self._reporter = stalls.StallReporter(self.waited_for, progress=self._queue.progress, clock=clock)
        self._reporter.start()

    # What the main thread calls.

    def iterate(self, dataset: WorkerDataset) -> WorkerIterator:
        """Begins a pass over a data set."""
        return WorkerIterator(self, dataset)

    def make_room(self) -> None:
        """Waits until another step may be queued. Raises the error of an earlier step."""
        self._queue.wait_until(lambda: self._queue.num_pending < self.window)

    def step(
        self,
        program: Program,
        tensors: Sequence[tf.Tensor],
        iterator: WorkerIterator | None,
        last: bool,
        is_update: bool = False,
        batch: Batch | None = None,
    ) -> list[np.ndarray]:
        """Queues a step whose result is a running total, such as Keras' logs.

        Args:
          program: The traced step.
          tensors: Its arguments besides the batch.
          iterator: The pass over the data.
          last: True for the last step of the pass.
          is_update: True if the step trains.
          batch: The batch, if a later step may use it again.

        Returns:
          The flat result of the newest finished step. This step's own result if `last`, or if no step was finished
          since the chief last wrote a variable (reset the metrics, for example).

        Raises:
          tf.errors.OutOfRangeError: No worker has data left.
        """
        if last:
            # Its result must include all earlier steps, which may finish in another order than they began.
            self._queue.wait_until(self._queue.is_empty)
        step = Step(program, tensors, iterator, is_update=is_update, batch=batch)
        if iterator is not None and not iterator.counted:
            step.took_batch = concurrent.futures.Future()
        step.wants_logs = self._queue.ask_for_logs(always=last)
        if not step.wants_logs:
            program.prepare_silent()
        self._put(step)
        if step.took_batch is not None:
            self._queue.wait_until(lambda: step.took_batch.done())
            if not step.took_batch.result():
                raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        self._queue.wait_until(lambda: self._queue.is_empty() or (not last and self._queue.logs is not None))
        if self._queue.logs is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return self._queue.logs

    def call(
        self,
        program: Program,
        tensors: Sequence[tf.Tensor],
        iterator: WorkerIterator | None,
        batch: Batch | None = None,
    ) -> list[np.ndarray]:
        """Queues a step and waits for its own result."""
        return self.wait_for(self.start(program, tensors, iterator, batch))

    def read_batch(self, iterator: WorkerIterator, handle: WorkerBatch) -> list[np.ndarray]:
        """Fetches the next batch of a worker's share, flat."""
        strategy = self.coordinator.strategy
        return self.call(Program(strategy, _itself, (handle,), {}, iterator.shares_known), [], iterator)

    def start(
        self,
        program: Program,
        tensors: Sequence[tf.Tensor],
        iterator: WorkerIterator | None,
        batch: Batch | None = None,
    ) -> concurrent.futures.Future:
        """Queues a step; returns a future of its result, which is None if no data were left."""
        result: concurrent.futures.Future = concurrent.futures.Future()
        self._put(Step(program, tensors, iterator, result=result, batch=batch))
        return result

    def wait_for(self, result: concurrent.futures.Future) -> list[np.ndarray]:
        """Waits for the result of `start`."""
        self._queue.wait_until(result.done)
        value = result.result()
        if value is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return value

    def barrier(self, writes: bool) -> None:
        """Waits for all queued steps, so that the chief's next read or write is ordered behind them.

        Args:
          writes: True if the chief is about to write; then logs of earlier steps are invalid.
        """
        if closures.current_worker() is not None:
            return
        if self._queue.needs_waiting:
            self._queue.wait_until(self._queue.is_empty)
        if writes:
            self._queue.logs = None

    def waited_for(self) -> str:
        """Returns the names of the workers that the steps in flight wait for."""
        return self._queue.waited_for()

    def close(self) -> None:
        """Cancels the steps in flight, and ends the engine's own thread."""
        self._reporter.stop()
        self._queue.forget_steps()

    def _put(self, step: Step) -> None:
        self.before_queueing()
        self._queue.put(step)


def _itself(batch: Any) -> Any:
    return batch
