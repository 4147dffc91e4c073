# SPDX-License-Identifier: Apache-2.0
"""Calls from the chief to the function of one server process (`compat/tensorflow/servers`).

A server that hangs holds up the calling thread alone. Operations copy request and answer, and wait without Python's
lock; NumPy would keep it.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.tensorflow import coordinator, graphs, servers
from tfdist.compat.tensorflow.coordinator import CHIEF_DEVICE
from tfdist.compression import on_servers
from tfdist.coordination.usage import USAGE_REQUEST, Usage
from tfdist.step.gradients import Kept, Memory
from tfdist.transforms import REPLICA


def call_server(task: str, request: bytes) -> np.ndarray:
    """Calls the function of a server process, such as "worker:0"; returns its answer, uint8, however long it takes."""
    job, _, index = task.partition(":")
    with tf.init_scope():
        with tf.device(CHIEF_DEVICE):
            inputs = [tf.constant(request)]
        with tf.device(f"/job:{job}/replica:0/task:{index}/device:CPU:0"):
            (answer,) = servers.call_function(inputs, [tf.uint8])
        with tf.device(CHIEF_DEVICE):
            answer = tf.identity(answer)
    return answer.numpy()


def within(timeout_secs: float, task: str, function: Callable[[], Any]) -> Any:
    """Returns what `function` returns, which calls `task`, or raises its error; TimeoutError after `timeout_secs`.

    It runs in a thread of its own, which is left behind if it takes too long.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            coordinator.clear_error()
            future.set_exception(error)

    threading.Thread(target=run, name=f"tfdist call to {task}", daemon=True).start()
    if not concurrent.futures.wait([future], timeout_secs).done:
        raise TimeoutError(
            f"{task} has not answered for {timeout_secs:g} s, although it is not lost: its process may be stopped. End "
            "the process, so that it is replaced, or give a busy machine more time with stall_timeout_secs. Received: "
            f"stall_timeout_secs={timeout_secs:g}"
        )
    return future.result()


# Server processes that are called at the same time.
_THREADS = 16


def check_codecs(num_workers: int, num_ps: int, timeout_secs: float) -> None:
    """Checks that codecs can be called in all server processes.

    Raises:
      RuntimeError: a server process was not started by tfdist; it is named.
      TimeoutError: a server process has not answered for `timeout_secs`.
    """
    tasks = [f"worker:{index}" for index in range(num_workers)] + [f"ps:{index}" for index in range(num_ps)]

    def check(task: str) -> str | None:
        try:
            within(timeout_secs, task, lambda: call_server(task, on_servers.request("probe")))
        except (tf.errors.OpError, RuntimeError) as error:
            # A worker that is being restarted is not checked.
            return None if coordinator.is_task_failure(error) else task
        return None

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        without = [task for task in threads.map(check, tasks) if task is not None]
    if without:
        raise RuntimeError(
            "policies: Compression has each server process encode or decode, which only processes of tfdist can: have "
            "each task construct tfdist.ParameterServerStrategy, and run one version of tfdist. Received: a server "
            f"without codecs at {', '.join(without)}"
        )


# State of gradient transforms: on a replica in the memory of its worker, for updates on the parameter servers.
#
# A worker's state is a resource with a name, which the traced step finds on whichever worker runs it, and makes on a
# worker that is new.


class ServerMemory(Memory):
    """State of the transforms of a `ParameterServerStrategy`. What a worker has is lost with its process.

    Args:
      strategy: the strategy.
      coordinator: the `ClusterCoordinator` of the workers.
      num_workers: number of workers.
      timeout_secs: longest wait for a worker that is not lost; then TimeoutError is raised.
      device: of a worker, where a replica's state is; the first one of its type by default.
    """

    def __init__(
        self, strategy: Any, coordinator: Any, num_workers: int, timeout_secs: float, device: str | None = None
    ) -> None:
        self._strategy, self._coordinator, self._device = weakref.proxy(strategy), coordinator, device
        self._num_workers, self._timeout_secs = num_workers, timeout_secs
        # Names of states whose optimizer or model is gone.
        self._ended: list[str] = []
        self._numbered: Any = None
        # Of this strategy: a server process may outlive it.
        self._prefix = uuid.uuid4().hex

    def replica(self) -> tf.Tensor:
        """See `Memory`: the index of the worker, which each worker keeps. It is 0 where the chief makes the step."""
        spec = tf.TensorSpec([], tf.int64)

        def number() -> None:
            worker = coordinator.this_worker()
            self._on_worker(worker, lambda: self._write_on_worker(["replica"], [spec], [tf.constant(worker, tf.int64)]))

        if tf.executing_eagerly():
            return tf.constant(0, tf.int64)
        if self._numbered is None:
            # A worker that is started again gets its number before its next step.
            self._numbered = graphs.call_outside(coordinator.create_on_workers, self._coordinator, number)
        return self._read_on_worker(["replica"], [spec], lambda: [tf.constant(-1, tf.int64)])[0]

    def read(self, state: Kept) -> list[tf.Tensor]:
        """See `Memory`."""
        if state.transform.where == REPLICA:
            return self._read_on_worker(self._names(state), state.specs, state.initial)
        return [variable.read_value() for variable in self._on_servers(state)]

    def write(self, state: Kept, values: Sequence[tf.Tensor], is_only: bool) -> None:
        """See `Memory`."""
        del is_only
        if state.transform.where == REPLICA:
            self._write_on_worker(self._names(state), state.specs, values)
            return
        for variable, value in zip(self._on_servers(state), values, strict=True):
            variable.assign(value, read_value=False)

    def collect(self, states: Sequence[Kept]) -> list[list[np.ndarray]]:
        """See `Memory`: a worker that is lost has the state of the beginning."""
        on_servers = {
            id(each): [variable.numpy() for variable in self._on_servers(each)]
            for each in states
            if each.transform.where != REPLICA
        }

        def of(worker: int, state: Kept) -> list[np.ndarray]:
            return on_servers[id(state)] if id(state) in on_servers else self._values_on(worker, state)

        return [[value for state in states for value in of(worker, state)] for worker in range(self._num_workers)]

    def distribute(self, states: Sequence[Kept], values: Callable[[int], Sequence[Sequence[np.ndarray]]]) -> None:
        """See `Memory`: a worker that is lost begins anew."""
        for worker, arrays in enumerate(values(self._num_workers)):
            left = iter(arrays)
            for state in states:
                own = [next(left) for _ in state.specs]
                if state.transform.where == REPLICA:
                    self._on_worker(
                        worker, lambda own=own, state=state: self.write(state, [*map(tf.constant, own)], True)
                    )
                elif not worker:
                    self.write(state, own, True)

    def _values_on(self, worker: int, state: Kept) -> list[np.ndarray]:
        def read() -> list[np.ndarray]:
            found = self.read(state)
            with tf.device(CHIEF_DEVICE):
                return [tf.identity(each).numpy() for each in found]

        found = self._on_worker(worker, read)
        return found if found is not None else [each.numpy() for each in graphs.call_outside(state.initial)]

    def _on_worker(self, worker: int, function: Callable[[], Any]) -> Any:
        """Returns what a function returns, whose operations run on a worker; None if the worker is lost."""
        if worker in coordinator.lost_workers(self._coordinator):
            return None
        device = tf.DeviceSpec.from_string(self._device or self._strategy.extended.worker_devices[0])
        kind = f"device:{device.device_type or 'CPU'}:{device.device_index or 0}"

        def call() -> Any:
            with tf.device(f"/job:worker/replica:0/task:{worker}/{kind}"):
                return function()

        try:
            return within(self._timeout_secs, f"worker:{worker}", call)
        except Exception as error:
            if not coordinator.is_task_failure(error):
                raise
            return None

    def _names(self, state: Kept) -> list[str]:
        if "names" not in state.held:
            self._drop_ended()
            name = uuid.uuid4().hex
            names = state.held["names"] = [f"{name}/{index}" for index in range(len(state.specs))]
            weakref.finalize(state, self._ended.extend, names)
        return state.held["names"]

    def _drop_ended(self) -> None:
        """Frees the memory of states that have ended, on all workers; waits for no worker."""
        names = [self._ended.pop() for _ in range(len(self._ended))]

        def drop() -> None:
            for name in names:
                handle = self._handle(name, tf.TensorSpec(None))
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

        for worker in range(self._num_workers) if names else ():
            threading.Thread(target=self._on_worker, args=(worker, drop), daemon=True).start()

    def _on_servers(self, state: Kept) -> list[Any]:
        def make() -> list[Any]:
            with self._strategy.scope():
                return [tf.Variable(value, trainable=False, name="transform") for value in state.initial()]

        if "variables" not in state.held:
            state.held["variables"] = graphs.call_outside(make)
        return state.held["variables"]

    def _handle(self, name: str, spec: tf.TensorSpec) -> tf.Tensor:
        shared_name = f"tfdist/{self._prefix}/{name}"

        def make() -> tf.Tensor:
            return tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=spec.shape, shared_name=shared_name)

        if tf.executing_eagerly():
            return make()
        # With the graph, which they hold: operations on one handle keep their order.
        of_graph = patching.setdefault(tf.compat.v1.get_default_graph(), "_tfdist_handles", dict)
        return of_graph[shared_name] if shared_name in of_graph else of_graph.setdefault(shared_name, make())

    def _read_on_worker(
        self, names: Sequence[str], specs: Sequence[tf.TensorSpec], initial: Callable[[], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        handles = [self._handle(*each) for each in zip(names, specs, strict=True)]

        def read() -> list[tf.Tensor]:
            return [
                tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype), spec.shape)
                for handle, spec in zip(handles, specs, strict=True)
            ]

        is_there = tf.raw_ops.VarIsInitializedOp(resource=handles[0])
        found = tf.cond(is_there, read, initial)
        # A list of one is returned as its element.
        return list(found) if isinstance(found, list | tuple) else [found]

    def _write_on_worker(
        self, names: Sequence[str], specs: Sequence[tf.TensorSpec], values: Sequence[tf.Tensor]
    ) -> None:
        for name, spec, value in zip(names, specs, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=self._handle(name, spec), value=value)


# Counters of the worker and ps processes, such as the bytes that they have sent, fetched by the chief.
#
# Each process samples itself (`serving/task`). The chief has its server return the newest sample: one small operation
# on that server's CPU, in a thread of its own. A server that hangs holds up this thread alone.


# Longest wait for the answers.
_TIMEOUT_SECS = 5.0


class TaskUsages:
    """Fetches the counters of all tasks; any thread may call it.

    Args:
      tasks: names of the tasks, such as "worker:0".
      lost: returns the indices of the workers that are lost now.
    """

    def __init__(self, tasks: Sequence[str], lost: Callable[[], set[int]]) -> None:
        self._tasks = tuple(tasks)
        self._lost = lost
        self._lock = threading.Lock()
        self._known: dict[str, Usage] = {}
        # Bytes and CPU time of a task's former processes.
        self._former: dict[str, Usage] = {}
        # Tasks with a request under way, or that can't answer one: their server is of another program.
        self._asked: set[str] = set()

    def fetch(self, only_new: bool = False) -> dict[str, Usage]:
        """Returns the counters of each task, the last known ones of a task that does not answer in time.

        Args:
          only_new: leaves out tasks that do not answer in time, or that another thread is asking.
        """
        lost = {f"worker:{index}" for index in self._lost()}
        with self._lock:
            free = [each for each in self._tasks if each not in lost | self._asked]
            self._asked.update(free)
        threads = [threading.Thread(target=self._ask, args=(each,), daemon=True) for each in free]
        until = time.monotonic() + _TIMEOUT_SECS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            answered = [task for task in free if task not in self._asked] if only_new else self._tasks
            return {task: self._known[task] for task in answered if task in self._known}

    def _ask(self, task: str) -> None:
        usage, can_answer = None, True
        try:
            usage = Usage.from_json(call_server(task, USAGE_REQUEST).tobytes())
        except Exception as error:  # Whatever a server answers, the report goes without its counters.
            can_answer = not isinstance(error, TypeError | tf.errors.InvalidArgumentError)
            coordinator.clear_error()
        with self._lock:
            if can_answer:
                self._asked.discard(task)
            last = self._known.get(task)
            if usage is not None and last is not None and last.started_at != usage.started_at:
                # The task was started again; the bytes of its former process count, too.
                self._former[task] = last
            if usage is not None:
                self._known[task] = usage.after(self._former[task]) if task in self._former else usage
