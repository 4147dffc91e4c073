# SPDX-License-Identifier: Apache-2.0
"""Access to `ClusterCoordinator` below its public surface, which no other module has.

`ClusterCoordinator.schedule` takes `tf.function`s only, and doesn't report the worker of a closure or its end. The
queue beneath it takes any callable, and runs it in the thread of a worker, so that the engine can track each closure in
that thread. `tests/compat/test_closures.py` fails if TensorFlow changes any of it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context

NEEDS = (
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClosureAbortedError",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClosureInputError",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.closure_queue",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.schedule(function, args, kwargs)",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.stop",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.workers",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator._cluster",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator._create_per_worker_resources",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker._is_dead_with_error",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker._process_closure(closure)",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker.worker_index",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue._error",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue.done",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_worker_failure",
    "tensorflow.python.distribute.coordinator.coordinator_context:get_current_dispatch_context",
    "tensorflow.python.eager.context:Context.executor",
    "tensorflow.python.eager.context:context",
)

# Errors by which the chief sees a lost or restarting task. The coordinator decides which of them it can retry; a
# closure raises them unchanged.
_TASK_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    cluster_coordinator.ClosureInputError,
    cluster_coordinator.ClosureAbortedError,
)


def schedule(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, function: Callable[..., None], *args: Any
) -> None:
    """Queues `function(*args)` for whichever worker is free first.

    It runs in that worker's thread on the chief, with the worker as the default device. It runs again, on another
    worker, when it raises an error that
    `is_task_failure` knows. Per-worker values among `args` arrive as the value of the worker it
    runs on.
    """
    coordinator._cluster.schedule(function, args, {})


def stop(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """Ends the coordinator's threads, and cancels the closures that it has."""
    logger = tf.get_logger()
    level = logger.level
    # In a notebook TensorFlow shows a line for each step of this, twice.
    logger.setLevel(logging.WARNING)
    try:
        coordinator._cluster.stop()
    finally:
        logger.setLevel(level)


def before_use(coordinator: tf.distribute.coordinator.ClusterCoordinator, function: Callable[[], None]) -> None:
    """Calls `function` whenever the program itself schedules on the coordinator, or waits for its closures.

    A closure that resides in a worker's thread would else keep that program's own closures waiting for ever.
    """
    for name in ("schedule", "join", "done"):
        setattr(coordinator, name, _preceded(function, getattr(type(coordinator), name), coordinator))


def _preceded(function: Callable[[], None], method: Callable[..., Any], coordinator: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        function()
        return method(coordinator, *args, **kwargs)

    return call


def after_each(coordinator: tf.distribute.coordinator.ClusterCoordinator, method: Callable[[int], None]) -> None:
    """Calls `method` with the index of a worker, in its thread, whenever that thread is done with a closure.

    If the worker was lost, that is when the coordinator has it back: `ClusterCoordinator` waits for it before it lets
    the closure go. The bound method is kept by a weak reference, because the threads of the workers would else keep
    the coordinator for as long as the process lives.
    """
    reference = weakref.WeakMethod(method)
    for worker in coordinator._cluster.workers:
        worker._process_closure = functools.partial(_followed, worker._process_closure, reference, worker.worker_index)


def _followed(process: Callable[[Any], None], reference: weakref.WeakMethod, worker: int, closure: Any) -> None:
    process(closure)
    method = reference()
    if method is not None:
        method(worker)


def create_on_workers(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, function: Callable[..., Any], *args: Any
) -> tf.distribute.coordinator.PerWorkerValue:
    """Runs `function(*args)` once on each worker, and again on a restarted worker; the values stay there."""
    return coordinator._create_per_worker_resources(function, args)


def current_worker() -> int | None:
    """The index of the worker whose thread this is, or None outside of a closure."""
    dispatch = coordinator_context.get_current_dispatch_context()
    return None if dispatch is None else int(dispatch.worker_index)


def this_worker() -> int:
    """The index of the worker whose thread this is.

    Raises:
      RuntimeError: It is no worker's thread.
    """
    worker = current_worker()
    if worker is None:
        raise RuntimeError("this_worker() was called outside of a closure")
    return worker


def lost_workers(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> set[int]:
    """The workers that the coordinator has found dead and that are not back yet."""
    return {worker.worker_index for worker in coordinator._cluster.workers if worker._is_dead_with_error}


def is_task_failure(error: BaseException) -> bool:
    """Returns True if a closure must raise `error` again, so that the coordinator retries it or reports it."""
    # The second kind: a worker that was restarted before its loss was detected.
    return isinstance(error, _TASK_FAILURES) or cluster_coordinator._is_worker_failure(error)


def clear_error() -> None:
    """Makes the calling worker's thread forget an error that was dealt with; TensorFlow would report it again."""
    context.context().executor.clear_error()


def has_failed(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> bool:
    """Returns True if the coordinator has stopped at an error, such as the loss of a parameter server."""
    return coordinator._cluster.closure_queue._error is not None


def raise_failure(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
    """Raises the error that the coordinator could not mend, if there is one. It waits for closures in flight to end."""
    coordinator._cluster.closure_queue.done()
