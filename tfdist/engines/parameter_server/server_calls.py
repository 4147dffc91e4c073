# SPDX-License-Identifier: Apache-2.0
"""Calls from the chief to the function of one server process (`compat/server_functions`).

A server that stands still holds up the calling thread alone: request and answer are copied by operations, which wait
without Python's lock, and not by NumPy, which keeps it.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures, optimizer_patches, server_functions
from tfdist.compat.cluster_joining import CHIEF_DEVICE
from tfdist.compression import error_feedback, on_servers
from tfdist.engines.parameter_server.transfer.encoding import Encoding
from tfdist.runtime.row_blocks import BLOCK_BYTES
from tfdist.runtime.usage import USAGE_REQUEST, Usage


def call_server(task: str, request: bytes, *arguments: tf.Tensor) -> np.ndarray:
    """Calls the function of a server process, and waits for its answer without a time limit.

    Args:
      task: name of the process, such as "worker:0".
      request: first argument of the function.
      *arguments: further ones, tensors on the chief.

    Returns:
      The answer, uint8.
    """
    job, _, index = task.partition(":")
    with tf.init_scope():
        with tf.device(CHIEF_DEVICE):
            inputs = [tf.constant(request), *arguments]
        with tf.device(f"/job:{job}/replica:0/task:{index}/device:CPU:0"):
            (answer,) = server_functions.call(inputs, [tf.uint8])
        with tf.device(CHIEF_DEVICE):
            answer = tf.identity(answer)
    return answer.numpy()


def within(timeout_secs: float, task: str, function: Callable[[], Any]) -> Any:
    """Returns what `function` returns, which calls `task`, or raises its error.

    It runs in a thread of its own, which is left behind if it takes too long.

    Raises:
      TimeoutError: it took longer than `timeout_secs`.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            closures.clear_error()
            future.set_exception(error)

    threading.Thread(target=run, name=f"tfdist call to {task}", daemon=True).start()
    if not concurrent.futures.wait([future], timeout_secs).done:
        raise TimeoutError(
            f"{task} has not answered for {timeout_secs:g} s, although it is not lost: its process may be stopped. End "
            "the process, so that it is replaced, or give a busy machine more time with stall_timeout_secs. Received: "
            f"stall_timeout_secs={timeout_secs:g}"
        )
    return future.result()


# State of codecs in the workers' processes: for checkpoints, and a check of all server processes at construction.
#
# The state of a worker that is lost is lost with its process; a replacement begins with an empty one.


# Server processes that are asked at the same time.
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
            within(timeout_secs, task, lambda: call_server(task, on_servers.probe_request()))
        except (tf.errors.OpError, RuntimeError) as error:
            # A worker that is being restarted is not checked.
            return None if closures.is_task_failure(error) else task
        return None

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        without = [task for task in threads.map(check, tasks) if task is not None]
    if without:
        raise RuntimeError(
            "policies: Compression has each server process encode or decode, which only processes of tfdist can: have "
            "each task construct tfdist.ParameterServerStrategy, and run one version of tfdist. Received: a server "
            f"without codecs at {', '.join(without)}"
        )


class CodecStates:
    """The codec's states in the workers' processes. A `policies.saved_state.WorkerState`.

    Args:
      encoding: of the strategy.
      coordinator: the `ClusterCoordinator` of the workers.
      num_workers: number of workers.
      timeout_secs: longest wait for a block of the state of a worker that is not lost; then TimeoutError is raised. A
        large state takes longer, as long as its blocks are sent.
      block_bytes: bytes of a block.
    """

    def __init__(
        self,
        encoding: Encoding,
        coordinator: Any,
        num_workers: int,
        timeout_secs: float,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._encoding, self._coordinator, self._num_workers = encoding, coordinator, num_workers
        self._timeout_secs, self._block_bytes = timeout_secs, block_bytes

    def collect(self, model: Any) -> tuple[Any, list[Any]]:
        """See `WorkerState.collect`: for each worker and optimizer one array, uint8; empty for a lost worker."""
        optimizers = optimizer_patches.optimizers_of(model)
        requests = [on_servers.collect_request(self._encoding.prefix_of(optimizer)) for optimizer in optimizers]

        def states_of(worker: int) -> list[np.ndarray]:
            return [self._state_of(f"worker:{worker}", request) for request in requests]

        by_worker = self._on_each(range(self._num_workers), states_of)
        empty = [np.zeros(0, np.uint8)] * len(requests)
        arrays = [array for worker in range(self._num_workers) for array in by_worker.get(worker, empty)]
        return {"codec": repr(self._encoding.codec), "optimizers": len(requests)}, arrays

    def distribute(self, model: Any, described: Any, arrays: Sequence[Any]) -> None:
        """See `WorkerState.distribute`. The state of workers that are not there any more is dropped."""
        if described is None:
            return
        optimizers = optimizer_patches.optimizers_of(model)
        count = len(optimizers)
        if described != {"codec": repr(self._encoding.codec), "optimizers": count}:
            error_feedback.say_begins_anew(described["codec"], self._encoding.codec)
            return
        requests = [on_servers.restore_request(self._encoding.prefix_of(optimizer)) for optimizer in optimizers]

        def restore(worker: int) -> None:
            for request, saved in zip(requests, arrays[worker * count : (worker + 1) * count], strict=True):
                for first in range(0, saved.size, self._block_bytes):
                    block, position = saved[first : first + self._block_bytes], np.array([first, saved.size])
                    self._call(f"worker:{worker}", request, block, position)

        saved_workers = len(arrays) // count if count else 0
        self._on_each(range(min(self._num_workers, saved_workers)), restore)

    def _state_of(self, worker: str, request: bytes) -> np.ndarray:
        """Returns the state of a worker, fetched block by block; empty if its process was replaced meanwhile."""
        whole, first = np.zeros(0, np.uint8), 0
        while not first or first < whole.size:
            answer = self._call(worker, request, np.array([first, self._block_bytes]))
            total, block = on_servers.block_of(answer)
            if not total:
                return np.zeros(0, np.uint8)
            if not first:
                whole = np.empty(total, np.uint8)
            whole[first : first + block.size] = block
            first += block.size
        return whole

    def _call(self, worker: str, request: bytes, *arrays: np.ndarray) -> np.ndarray:
        return within(self._timeout_secs, worker, lambda: call_server(worker, request, *map(tf.constant, arrays)))

    def _on_each(self, workers: Sequence[int], function: Callable[[int], Any]) -> dict[int, Any]:
        """Calls `function` for each worker that is not lost; returns the results of those not lost meanwhile."""
        results = {}
        lost = closures.lost_workers(self._coordinator)
        for worker in workers:
            if worker in lost:
                continue
            try:
                results[worker] = function(worker)
            except Exception as error:
                if not closures.is_task_failure(error):
                    raise
        return results


# Counters of the worker and ps processes, such as the bytes that they have sent, fetched by the chief.
#
# Each process samples itself (`serving/task_server`). The chief has its server return the newest sample: one small
# operation on that server's CPU, in a thread of its own, which a server that stands still holds up alone.


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
        # Tasks that are being asked, and those that can't answer: their server is of another program.
        self._asked: set[str] = set()
        self._foreign: set[str] = set()

    def fetch(self, timeout_secs: float = _TIMEOUT_SECS, only_new: bool = False) -> dict[str, Usage]:
        """Returns the counters of each task, the last known ones of a task that does not answer in time.

        Args:
          timeout_secs: longest wait for the answers.
          only_new: leaves out tasks that do not answer in time, or that another thread is asking.
        """
        lost = {f"worker:{index}" for index in self._lost()}
        with self._lock:
            free = [each for each in self._tasks if each not in lost | self._asked | self._foreign]
            self._asked.update(free)
        threads = [threading.Thread(target=self._ask, args=(each,), daemon=True) for each in free]
        until = time.monotonic() + timeout_secs
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            answered = [task for task in free if task not in self._asked] if only_new else self._tasks
            return {task: self._known[task] for task in answered if task in self._known}

    def _ask(self, task: str) -> None:
        usage, is_foreign = None, False
        try:
            usage = Usage.from_json(call_server(task, USAGE_REQUEST).tobytes())
        except Exception as error:  # Whatever a server answers, the report goes without its counters.
            is_foreign = isinstance(error, TypeError | tf.errors.InvalidArgumentError)
            closures.clear_error()
        with self._lock:
            self._asked.discard(task)
            if is_foreign:
                self._foreign.add(task)
            if usage is not None:
                self._take(task, usage)

    def _take(self, task: str, usage: Usage) -> None:
        last = self._known.get(task)
        if last is not None and last.started_at != usage.started_at:
            # The task was started again; the bytes of its former process count, too.
            self._former[task] = last
        if task in self._former:
            usage = usage.after(self._former[task])
        self._known[task] = usage
