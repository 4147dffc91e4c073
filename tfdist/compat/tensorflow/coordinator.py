# SPDX-License-Identifier: Apache-2.0
"""Access to `ClusterCoordinator` below its public surface, which no other module has.

`ClusterCoordinator.schedule` takes `tf.function`s only, and doesn't report the worker of a closure or its end. The
queue beneath it takes any callable, and runs it in the thread of a worker. So the engine can track each closure in that
thread. `tests/compat/test_closures.py` fails if TensorFlow changes any of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Container
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context, executor

from tfdist.compat import patching

NEEDS = (
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_is_worker_failure",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.closure_queue",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.schedule(function, args, kwargs), stop",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster.workers",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator._cluster",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator._create_per_worker_resources",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker._is_dead_with_error",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker._process_closure(closure)",
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue._error",
    "tensorflow.python.distribute.coordinator.coordinator_context:get_current_dispatch_context",
    "tensorflow.python.eager.context:Context.executor, get_server_def, update_server_def(server_def)",
    "tensorflow.python.eager.context:context, set_server_def_retries",
    "tensorflow.python.eager.executor:new_executor(enable_async)",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._allow_run_without_coordinator",
)


# Errors by which the chief sees a lost or restarting task. The coordinator decides which of them it can retry; a
# closure raises them unchanged.
_TASK_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class _Thread(threading.local):
    worker = -1
    is_scheduling = False


# `worker` is the index of the worker whose closure this thread runs; `is_scheduling` is True while it hands one to a
# coordinator of `before_use`, which traces its function.
thread = _Thread()


def scheduling(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> Callable[..., object]:
    """Returns what queues `function(*args)` for whichever worker is free first: a function of (function, args, {}).

    The closure runs in that worker's thread on the chief, with the worker as the default device. It runs again, on
    another worker, when it raises an error that `is_task_failure` knows. Per-worker values among `args` arrive as the
    value of the worker it runs on.
    """
    return coordinator._cluster.schedule


def stop_coordinator(coordinator: tf.distribute.coordinator.ClusterCoordinator) -> None:
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
        patching.put_method(coordinator, name, _preceded, function, name)


def _preceded(coordinator: Any, function: Callable[[], None], name: str, /, *args: Any, **kwargs: Any) -> Any:
    function()
    before, thread.is_scheduling = thread.is_scheduling, name == "schedule"
    try:
        return getattr(type(coordinator), name)(coordinator, *args, **kwargs)
    finally:
        thread.is_scheduling = before


def after_each(
    coordinator: tf.distribute.coordinator.ClusterCoordinator, lost: Container[int], method: Callable[[int], None]
) -> None:
    """Calls `method` with the index of a worker in `lost`, in its thread, when that thread is done with a closure.

    That is when the coordinator has the worker back: `ClusterCoordinator` waits for it before it lets the closure go.
    The bound method is kept by a weak reference. Else the threads of the workers would keep the coordinator for the
    life of the process.
    """
    reference = weakref.WeakMethod(method)
    for index, worker in enumerate(coordinator._cluster.workers):
        _executors.append(executor.new_executor(enable_async=False))
        given = worker._process_closure, _executors[-1], lost, reference, index
        worker._process_closure = functools.partial(_followed, *given)


# Executors of the threads of workers. TensorFlow knows them by the number of the thread, which a later thread may have:
# they are kept for the life of the process.
_executors: list[Any] = []


def _followed(
    process: Callable[[Any], None],
    idle: Any,
    lost: Container[int],
    reference: weakref.WeakMethod,
    worker: int,
    closure: Any,
) -> None:
    thread.worker = worker
    # A closure changes to the executor of its worker and back. At the change back TensorFlow waits for all that the
    # earlier one has under way. That would be the executor of all threads, which also frees the tensors of all tasks:
    # every worker would wait for one that does not answer. The one that is set here has nothing to do.
    context.context().executor = idle
    process(closure)
    if worker in lost and (method := reference()) is not None:
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
    return {index for index, worker in enumerate(coordinator._cluster.workers) if worker._is_dead_with_error}


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
    # Past `before_use`.
    type(coordinator).done(coordinator)


# Connection of the chief to a parameter-server cluster: the stock `_connect_to_cluster` with two differences.
#
# * The chief joins as job localhost, its current job. The stock strategy renames its devices to job chief. Then
#   earlier objects, such as a data set, can't find their device any more.
# * The parameter servers know each other's addresses: the update of a model on several servers is one function.


CHIEF_JOB = "localhost"
# As the stock strategy has it: tasks that are restarted meanwhile are waited for.
_CONNECT_RETRIES = 50
# In full, so that it means the same in the thread of a worker, whose default device is merged with it.
CHIEF_DEVICE = f"/job:{CHIEF_JOB}/replica:0/task:0/device:CPU:0"
SERVER_DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"


def connect(cluster_spec: tf.train.ClusterSpec) -> None:
    """Joins this process to the cluster, as its chief, and waits for the connection.

    Args:
      cluster_spec: all tasks; the chief's job is `CHIEF_JOB`.
    """
    filters = tf.config.experimental.ClusterDeviceFilters()
    for index in range(cluster_spec.num_tasks("worker")):
        # A worker doesn't need the state of other workers.
        filters.set_device_filters("worker", index, ["/job:ps", f"/job:{CHIEF_JOB}"])
    # As in the stock strategy: one call under way to each worker, and no asynchronous executors. So a lost worker is
    # noticed by the call that meets it.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    tf.config.experimental_connect_to_cluster(
        cluster_spec, job_name=CHIEF_JOB, protocol="grpc", cluster_device_filters=filters
    )
    context.set_server_def_retries(_CONNECT_RETRIES)
    own = context.context()
    own.update_server_def = functools.partial(_update_alone, type(own).update_server_def, own)
    # Begins the runtime.
    tf.config.list_logical_devices()


def _update_alone(update: Callable[..., None], own: Any, *args: Any, **kwargs: Any) -> None:
    """Updates the context's tasks once its executor has nothing under way.

    TensorFlow would wait with the lock of all kernels, such as 20 s for a vanished host to free results of a step. Each
    operation of the chief would stand still meanwhile, with Python's lock.
    """
    with contextlib.suppress(tf.errors.OpError):
        own.executor.wait()
    update(own, *args, **kwargs)


def disconnect() -> None:
    """Takes this process out of its cluster, if it is in one; it can continue alone, or join another cluster.

    Else TensorFlow would register each new function with the servers, and write an error for each that has ended.
    """
    described = copy.deepcopy(context.context().get_server_def())
    if described is None:
        return
    for job in [job for job in described.cluster.job if job.name != CHIEF_JOB]:
        described.cluster.job.remove(job)
    described.ClearField("cluster_device_filters")
    # A server that has ended already can't be told.
    with contextlib.suppress(tf.errors.OpError):
        context.context().update_server_def(described)


def allow_without_coordinator(strategy: Any) -> None:
    """Makes the stock `run` accept functions that no coordinator schedules, about which it warns; later it refuses."""
    strategy.extended._allow_run_without_coordinator = True
