# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy`: each step is a closure of TensorFlow's `ClusterCoordinator`.

How a step flows:

    Keras' loop (chief, main thread)    a worker's thread (chief)       the worker's process
      next(iterator)  make_room():
                      waits until fewer
                      than `window` steps
                      are under way
      the function of step(): queues a
      the strategy    closure        -->  takes the next closure,   -->  the traced step: reads its batch
                      and returns         runs its Program               and the variables, updates the
                      the newest logs     on its worker             <--  variables (on the parameter servers)
      metric.result() barrier(): waits
                      for all steps,
                      then reads

The main thread owns the order of steps, and each worker's thread owns the calls of its worker. They share `step_queue`.

`fit` and `evaluate` call the function that `ParameterServerStrategy.function_of` gives them. A loop of the user's own
calls `run`, which leaves an operation in its graph that calls Python.
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

from tfdist.compat import closures, cluster_joining, python_operation, step_errors
from tfdist.compat.calls import Call
from tfdist.data import splitting
from tfdist.engines.base import Engine
from tfdist.engines.parameter_server import worker_batch, worker_function
from tfdist.engines.parameter_server.step_queue import Step, StepQueue
from tfdist.engines.parameter_server.transfer import plan
from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.engines.parameter_server.worker_function import Program, Programs
from tfdist.engines.parameter_server.worker_pass import Batch, WorkerIterator
from tfdist.policies.base import Update
from tfdist.runtime import lost_servers, stalls
from tfdist.step import keras_steps, one_replica

# Those that a step raises for it; operations that call Python make the first of most others.
_OF_A_LOST_SERVER = (
    tf.errors.UnknownError,
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
      data_service_address: Returns the address of the tf.data service's dispatcher, "grpc://host:port", and starts it
        if needed; called with True if the data are endless.
      clock: Returns seconds, monotonic; replaced in tests.
      stall_timeout_secs: Longest time without a completed step, after which a wait raises an error.
      on_update: Called with each `Update`: its worker, and its staleness. An update counts when its result arrives at
        the chief.
      transfer: Form in which variables and gradients cross the network; stock TensorFlow's by default.
      data_sharding: See `ParameterServerStrategy`.
    """

    # Number of gradients of an update, and of parts of a batch.
    replicas_to_aggregate = num_parts = 1

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        num_workers: int,
        data_service_address: Callable[[bool], str],
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
        self.data_service_address = data_service_address
        self.programs = Programs(strategy, self.coordinator, transfer or plan.plain())
        # Each worker computes one step while the next one waits in the queue; more would only make the logs older.
        self.window = 2 * num_workers + 1
        # Called before a step is queued; another engine that occupies the workers' threads returns them then.
        self.before_queueing: Callable[[], None] = lambda: None
        # Addresses of the parameter servers by index; they are asked when a step has failed.
        self.servers: Mapping[int, str] = {}
        self._queue = StepQueue(self.coordinator, num_workers, clock, stall_timeout_secs, on_update)
        self._reporter = stalls.StallReporter(self.waited_for, progress=self._queue.progress, clock=clock)
        self._reporter.start()
        step_errors.install()

    # What the strategy and its data sets call.

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

    def open(self, dataset: WorkerDataset, fit: Call | None) -> WorkerIterator:
        """Begins a pass over a data set, for any loop."""
        del fit
        return WorkerIterator(self, dataset, by_execution=True)

    def run(self, step: Callable[..., Any], handle: WorkerBatch) -> Any:
        """Makes an update from the batch of a handle, on one worker; see `run_function`."""
        return self.run_function(step, (handle,), {})

    def prepared(self, step: Callable[..., Any], handle: WorkerBatch) -> Callable[[WorkerIterator], Any]:
        """Traces a train or test step of Keras; returns what makes it of the next batch, and returns the newest logs.

        Args:
          step: a model's bound `train_step` or `test_step`.
          handle: of the next batch; the step is traced for handles of its kind.
        """
        kind, program_for = keras_steps.classify(step), self._programs_of(step, (handle,), {})
        # Before anything of the data is read: most passes that train are fed by the workers.
        program_for(kind == "train", False)

        def make(iterator: WorkerIterator) -> Any:
            program = program_for(worker_function.takes_batches_itself(kind, iterator), False)
            return program.rebuild(self._dispatch(kind, program, [], iterator.next_batch()))

        return make

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs any function on one worker; in a graph it leaves an operation that does so each time it runs.

        Returns:
          The function's result; of a train or test step of Keras the newest logs (see `step`).
        """
        return (self._run_eagerly if tf.executing_eagerly() else self._run_in_graph)(fn, args, kwargs)

    def run_on_chief(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a function untraced, with a batch brought to the chief: prints and breakpoints in it see values."""
        self.barrier(writes=True)
        args, kwargs = worker_batch.as_values(args, kwargs)
        with self._strategy.scope(), one_replica.replica_on(self._strategy, cluster_joining.CHIEF_DEVICE):
            return fn(*args, **kwargs)

    def _run_eagerly(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        kind, handles = keras_steps.classify(fn), worker_batch.handles_in((args, kwargs))
        numbers = [int(handle.content) for handle in handles]
        batch = worker_function.unused(numbers)
        iterator, in_parts = batch and batch.iterator, batch is None and bool(handles)
        program = self.programs.find(kind, fn, args, kwargs, iterator, in_parts)
        parts = worker_function.parts_on_chief(numbers, handles) if in_parts else []
        return program.rebuild(self._dispatch(kind, program, parts + program.flatten_arguments(args, kwargs), batch))

    def _run_in_graph(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        kind, handles = keras_steps.classify(fn), worker_batch.handles_in((args, kwargs))
        program_for = self._programs_of(fn, args, kwargs)
        program = program_for(bool(handles) and kind not in ("test", "predict"), False)

        def queue(*inputs: tf.Tensor) -> list[np.ndarray]:
            numbers, tensors = [int(number) for number in inputs[: len(handles)]], list(inputs[len(handles) :])
            batch = worker_function.unused(numbers)
            if batch is None and handles:
                parts = worker_function.parts_on_chief(numbers, handles)
                return self._dispatch(kind, program_for(False, True), parts + tensors, None)
            worker_fed = batch is not None and worker_function.takes_batches_itself(kind, batch.iterator)
            return self._dispatch(kind, program_for(worker_fed, False), tensors, batch)

        inputs = [handle.content for handle in handles] + program.flatten_arguments(args, kwargs)
        return program.rebuild(python_operation.call(queue, inputs, program.dtypes))

    def _programs_of(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Callable[[bool, bool], Program]:
        """Creates the variables of `fn`; returns what traces it, once for each `worker_fed` and `in_parts`."""
        self.programs.rehearse(fn, args, kwargs)
        return functools.cache(lambda worker_fed, in_parts: self.programs.trace(fn, args, kwargs, worker_fed, in_parts))

    def _dispatch(self, kind: str, program: Program, tensors: list[tf.Tensor], batch: Batch | None) -> list[np.ndarray]:
        """Queues or runs a step, by its kind; returns its flat result.

        Args:
          kind: see `keras_steps.classify`.
          program: the traced step.
          tensors: arguments besides the batch.
          batch: the batch; None if the batch, or parts of several batches, are among the tensors.
        """
        if batch is None:
            return self.call(program, tensors, None)
        iterator = batch.iterator
        if kind == "predict":
            return self._predict(program, iterator)
        if iterator.feed(False) == "chief":
            batch.on_chief = iterator.next_local_batch()
            tensors = batch.on_chief + tensors
            iterator.redeem()
        if kind in ("train", "test") or not program.dtypes:
            is_last, is_update = iterator.is_last, kind == "train"
            return self.step(program, tensors, iterator, last=is_last, is_update=is_update, batch=batch)
        return self.call(program, tensors, iterator, batch)

    def _predict(self, program: Program, iterator: WorkerIterator) -> list[np.ndarray]:
        """Returns the predictions for the next batch, while steps for later batches are in flight."""
        ahead = iterator.started
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while len(ahead) < self.window:
                ahead.append(self.start(program, iterator.next_local_batch(), iterator))
        if not ahead:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        iterator.redeem()
        return self.wait_for(ahead.popleft())

    # Steps of the main thread.

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
          batch: The batch, if a later step may use it again; or the handle's batches, of a step each.

        Returns:
          The flat result of the newest finished step. This step's own result if `last`, or if no step was finished
          since the chief last wrote a variable (reset the metrics, for example).

        Raises:
          tf.errors.OutOfRangeError: No worker has data left.
        """
        if last:
            # Its result must include all earlier steps, which may finish in another order than they began.
            self._queue.wait_until(self._queue.is_empty)
        count = 1 if batch is None else batch.count
        step = Step(program, tensors, iterator, is_update=is_update, batch=batch, count=count)
        if iterator is not None and not iterator.counted:
            step.took_batch = concurrent.futures.Future()
        step.wants_logs = self._queue.ask_for_logs(always=last)
        if count > 1:
            program.prepare_several()
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
        count = 1 if batch is None else batch.count
        self._put(Step(program, tensors, iterator, result=result, batch=batch, count=count))
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
        if closures.current_worker() is not None:
            return
        if self._queue.needs_waiting:
            self._queue.wait_until(self._queue.is_empty)
        if writes:
            self._queue.logs = None

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`: the operation of a step gives the error of a lost server another type."""
        if not isinstance(error, _OF_A_LOST_SERVER):
            return None
        is_unavailable = isinstance(error, tf.errors.UnavailableError) or "UnavailableError:" in error.message
        brief, lost = python_operation.told_briefly(error.message), lost_servers.described(self.servers, is_unavailable)
        if lost:
            return tf.errors.UnavailableError(None, None, f"{lost} ({brief})")
        # A server that was started again accepts connections; its variables are gone all the same.
        return tf.errors.UnavailableError(None, None, brief) if is_unavailable else None

    def waited_for(self) -> str:
        """Returns the names of the workers that the steps in flight wait for."""
        return self._queue.waited_for()

    def close(self) -> None:
        """Cancels the steps in flight, and ends the engine's own thread; may be called again."""
        self._reporter.stop()
        self._queue.forget_steps()

    def _put(self, step: Step) -> None:
        self.before_queueing()
        self._queue.put(step)


def _itself(batch: Any) -> Any:
    return batch
