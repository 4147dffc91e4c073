# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy`: each step is a closure of TensorFlow's `ClusterCoordinator`.

How a step flows:

    Keras' loop (chief, main thread)    a worker's thread (chief)       the worker's process
      the function of step(): waits until
      the strategy    fewer than `window`
                      steps are under
                      way, queues a
                      closure        -->  takes the next closure,   -->  the traced step: reads its batch
                      and returns         runs its Program               and the variables, updates the
                      the newest logs     on its worker             <--  variables (on the parameter servers)
      metric.result() barrier(): waits
                      for all steps,
                      then reads

The main thread owns the order of steps, and each worker's thread owns the calls of its worker. They share `step_queue`.

`fit` and `evaluate` call the function that `ParameterServerStrategy.function_of` gives them; a loop of the user's own
calls `run`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import coordinator, graphs
from tfdist.coordination import lost_servers, stalls
from tfdist.engines import worker_function
from tfdist.engines.base import Engine
from tfdist.engines.step_queue import QueuedStep, StepQueue
from tfdist.engines.transfer import plan
from tfdist.engines.worker_function import Program, Programs
from tfdist.passes import splitting, worker_batch
from tfdist.passes.handle import check_eager
from tfdist.passes.worker_batch import WorkerBatch
from tfdist.passes.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.passes.worker_pass import Batch, ChiefFeed, WorkerFeed, WorkerIterator
from tfdist.policies.base import Update
from tfdist.step import one_replica
from tfdist.step.step import Step

# Errors that a step raises for it.
_OF_A_LOST_SERVER = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


class AsynchronousEngine(Engine):
    """Runs functions on the workers; of Keras' steps it keeps a bounded window in flight.

    Args:
      strategy: The strategy whose cluster it drives.
      num_workers: Number of workers in the cluster.
      clock: Returns seconds, monotonic; replaced in tests.
      stall_timeout_secs: Longest time without a completed step, after which a wait raises an error.
      on_update: Called with each `Update`: its worker, and its staleness. An update counts when its result arrives at
        the chief.
      transfer: Form in which variables and gradients cross the network; stock TensorFlow's by default.
      data_sharding: See `ParameterServerStrategy`.
    """

    # Number of gradients of an update, and of parts of a batch.
    replicas_to_aggregate = num_parts = 1
    marks_end = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
        stall_timeout_secs: float = 600.0,
        on_update: Callable[[Update], object] = lambda update: None,
        transfer: plan.TransferPlan | None = None,
        data_sharding: str = "shard",
    ):
        self._strategy = strategy
        self.data_sharding = data_sharding
        self.num_workers = num_workers
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.programs = Programs(strategy, self.coordinator, transfer or plan.TransferPlan("plain"))
        # Each worker computes one step while the next one waits in the queue; more would only make the logs older.
        self.window = 2 * num_workers + 1
        # Addresses of the parameter servers by index; they are probed when a step has failed.
        self.servers: Mapping[int, str] = {}
        self._queue = StepQueue(self.coordinator, clock, stall_timeout_secs, on_update)
        # Returns the names of the workers that the steps in flight wait for.
        self.waited_for = self._queue.waited_for
        self._reporter = stalls.StallReporter(self.waited_for, progress=self._queue.progress, clock=clock)
        self._reporter.start()

    # Called by the strategy and its data sets.

    def share_workers(self, leave: Callable[[], None]) -> None:
        """Shares the workers' threads with another engine, which makes all train steps of Keras' loops.

        Args:
          leave: returns the threads; called before a step is queued, and before the program uses the coordinator.
        """
        self._queue.before_put = leave
        self.programs.accumulates = False
        coordinator.before_use(self.coordinator, leave)

    def follow_losses(self, on_loss: Callable[[int, bool], object]) -> None:
        """Calls `on_loss(worker, is_lost)` when a worker is lost, and when it is back."""
        self._queue.on_loss = on_loss

    def in_order(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the data set in an order that is the same for all workers, if each of them reads its share."""
        return splitting.reorder_batches(dataset, seed=0) if self.data_sharding == "shard" else dataset

    def distribute(self, dataset: tf.data.Dataset) -> WorkerDataset:
        """Returns a data set of handles, of whose batches each worker reads its share."""
        return WorkerDataset(self, self.in_order(dataset), self.data_sharding)

    def distribute_own(self, datasets: Sequence[tf.data.Dataset]) -> WorkerDataset:
        """Returns a data set of handles, from one data set per worker."""
        return WorkerDatasetFromFunction(self, datasets)

    def open(self, dataset: WorkerDataset, fit: calls.Call | None) -> WorkerIterator:
        """Begins a pass over a data set, for any loop."""
        del fit
        return WorkerIterator(self, dataset, by_execution=True)

    def run(self, step: Step, handle: WorkerBatch) -> Any:
        """Makes an update from the batch of a handle, on one worker; see `run_function`."""
        return self.run_function(step, (handle,), {})

    def prepared(self, step: Step, handle: WorkerBatch) -> Callable[[WorkerIterator, WorkerBatch], Any]:
        """See `Engine.prepared`, also for a step that evaluates or predicts: the logs are the newest ones."""
        # By whether a worker reads the batch itself.
        program_for = functools.cache(lambda worker_fed: self.programs.trace(step, (handle,), {}, worker_fed))
        if step.kind == "predict":
            predicting = program_for(False)
            return lambda iterator, handle: predicting.rebuild(self._predict(predicting, iterator.feed))  # type: ignore[arg-type]
        trains = step.kind == "train"
        # Before anything of the data is read: most passes that train are fed by the workers.
        program_for(trains)
        # The newest logs are the same for many steps.
        flat: Any = None
        logs: Any = None
        # True if logs have the keys of the metrics' results, which Keras then shows at the end of a pass instead; known
        # after the first pass.
        are_results = False

        def needs_logs() -> bool:
            # Else the first step does not wait for its logs, nor the last one for all others, so as to be the one whose
            # logs include theirs: each would leave all workers but one idle.
            return not are_results or (call := calls.current()) is None or call.follows_batches

        def make(iterator: WorkerIterator, handle: WorkerBatch) -> Any:
            nonlocal flat, logs, are_results
            tensors, feed = (), iterator.feed
            program = program_for(feed.in_step)
            if isinstance(feed, ChiefFeed):
                tensors, feed = iterator.chief_batch(feed), None
            is_last, is_alone = iterator.is_last, iterator.is_last and needs_logs()
            newest = self.step(program, tensors, feed, is_alone, trains, iterator.count, waits=needs_logs)
            if is_last:
                self.barrier()
            if newest is None:
                # What metrics without an example show.
                return dict.fromkeys(logs, 0.0)
            if newest is not flat:
                flat, logs = newest, program.rebuild(newest)
            if is_alone and not are_results and isinstance(logs, dict) and logs:
                are_results = logs.keys() == step.model.get_metrics_result().keys()
            return {**logs} if isinstance(logs, dict) else logs

        return make

    def run_function(self, step: Step, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs any function on one worker, outside of graphs.

        Returns:
          The function's result; of a train or test step of Keras the newest logs (see `step`).
        """
        check_eager("strategy.run")
        kind, batch = step.kind, worker_function.unused(worker_batch.handles_in((args, kwargs)))
        if batch is None:
            # The tensors of several batches, or of one that was used before, are arguments as others are.
            of_args, of_kwargs = worker_batch.as_specs(args, kwargs)
            program = self.programs.find(step, of_args, of_kwargs, None)
            args, kwargs = worker_batch.as_values(args, kwargs)
            return program.rebuild(self.call(program, program.flatten_arguments(args, kwargs)))
        iterator = batch.iterator
        # If a policy makes the workers read parts of batches, the chief sends whole batches to all other steps.
        feed = iterator.decide(by_chief=kind in ("test", "predict") or iterator.dataset.is_cut)
        program = self.programs.find(step, args, kwargs, feed)
        tensors = program.flatten_arguments(args, kwargs)
        if isinstance(feed, ChiefFeed):
            batch.on_chief = whole = iterator.chief_batch(feed)
            tensors, feed = whole + tensors, None
        if kind in ("train", "test") or not program.dtypes:
            newest = self.step(program, tensors, feed, iterator.is_last, kind == "train", batch=batch)
            return program.rebuild(newest)  # type: ignore[arg-type]
        return program.rebuild(self.call(program, tensors, feed, batch))

    def run_on_chief(self, step: Step, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a function untraced, with a batch brought to the chief: prints and breakpoints in it see values."""
        self.barrier(writes=True)
        args, kwargs = worker_batch.as_values(args, kwargs)
        with self._strategy.scope(), one_replica.replica_on(self._strategy, coordinator.CHIEF_DEVICE):
            return step.function(*args, **kwargs)

    def _predict(self, program: Program, feed: ChiefFeed) -> list[np.ndarray]:
        """Returns the predictions for the next batch, while steps for later batches are in flight."""
        ahead = feed.predictions
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while len(ahead) < self.window:
                ahead.append(self.start(program, feed.next_batch()))
        if not ahead:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        feed.redeem()
        return self.wait_for(ahead.popleft())

    # Steps of the main thread.

    def step(
        self,
        program: Program,
        tensors: Sequence[tf.Tensor],
        feed: WorkerFeed | None,
        last: bool,
        is_update: bool = False,
        count: int = 1,
        batch: Batch | None = None,
        waits: Callable[[], bool] = lambda: True,
    ) -> list[np.ndarray] | None:
        """Queues a step whose result is a running total, such as Keras' logs, once fewer than `window` are under way.

        Args:
          program: The traced step.
          tensors: Its arguments besides the batch.
          feed: Of the pass, if a worker reads the batch.
          last: True for the last step of the pass.
          is_update: True if the step trains.
          count: How many batches it takes, for a step each.
          batch: The batch, if a later step may use it again.
          waits: Called if no step was finished since the chief last wrote a variable (reset the metrics, for example);
            returns True to wait for the first one.

        Returns:
          The flat result of the newest finished step; this step's own result if `last`. None without one, unless
          `waits`.

        Raises:
          tf.errors.OutOfRangeError: No worker has data left.
          Exception: the error of an earlier step.
        """
        queue = self._queue
        # The result of the last one must include all earlier steps, which may finish in another order than they began.
        queue.wait_until(fewer_than=1 if last else self.window)
        step = QueuedStep(program, tensors, feed, is_update=is_update, batch=batch, count=count)
        if feed is not None and not feed.is_counted:
            step.took_batch = concurrent.futures.Future()
        if count > 1:
            program.prepare_several()
        is_waiting = last or (program not in queue.logs and waits())
        wants_logs = queue.put(step, is_waiting)
        if not wants_logs and not program.knows_silence:
            program.prepare_silent()
        if step.took_batch is not None:
            queue.wait_until(step.took_batch.done)
            if not step.took_batch.result():
                raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        logs = queue.logs.get(program)
        if last or (logs is None and is_waiting):
            queue.wait_until(lambda: not queue.pending or (not last and queue.logs.get(program) is not None))
            logs = queue.logs.get(program)
            if logs is None:
                raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return logs

    def call(
        self, program: Program, tensors: Sequence[tf.Tensor], feed: WorkerFeed | None = None, batch: Batch | None = None
    ) -> list[np.ndarray]:
        """Queues a step and waits for its own result."""
        return self.wait_for(self.start(program, tensors, feed, batch))

    def read_batch(self, feed: WorkerFeed, handle: WorkerBatch) -> list[np.ndarray]:
        """Fetches the next batch of a worker's share, flat."""
        strategy = self.coordinator.strategy
        return self.call(Program(strategy, _itself, (handle,), {}, feed.in_step), [], feed)

    def start(
        self, program: Program, tensors: Sequence[tf.Tensor], feed: WorkerFeed | None = None, batch: Batch | None = None
    ) -> concurrent.futures.Future:
        """Queues a step; returns a future of its result, which is None if no data were left."""
        result: concurrent.futures.Future = concurrent.futures.Future()
        self._queue.put(QueuedStep(program, tensors, feed, result=result, batch=batch))
        return result

    def wait_for(self, result: concurrent.futures.Future) -> list[np.ndarray]:
        """Waits for the result of `start`."""
        self._queue.wait_until(result.done)
        value = result.result()
        if value is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return value

    def barrier(self, writes: bool = False) -> None:
        """See `Engine.barrier`: waits for all queued steps."""
        if coordinator.current_worker() is not None:
            return
        self._queue.wait_until()
        if writes:
            self._queue.logs.clear()

    def end_call(self, error: BaseException) -> None:
        """Keeps errors of the steps that a call leaves in flight, which has raised, out of later calls."""
        del error
        self._queue.abandon_steps()

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`: the error of a lost server has one of several types."""
        if not isinstance(error, _OF_A_LOST_SERVER):
            return None
        is_unavailable = isinstance(error, tf.errors.UnavailableError)
        brief = graphs.told_briefly(error.message)
        lost = lost_servers.describe_lost(self.servers, is_unavailable)
        if lost:
            return tf.errors.UnavailableError(None, None, f"{lost} ({brief})")
        # A server that was started again accepts connections; its variables are gone all the same.
        return tf.errors.UnavailableError(None, None, brief) if is_unavailable else None

    def close(self) -> None:
        """Cancels the steps in flight, and ends the engine's own thread; may be called again."""
        self._reporter.stop()
        self._queue.forget_steps()


def _itself(batch: Any) -> Any:
    return batch
