# SPDX-License-Identifier: Apache-2.0
"""State of codecs in the workers' processes: for checkpoints, and a check of all server processes at construction.

The state of a worker that is lost is lost with its process; a replacement begins with an empty one.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures, optimizer_patches
from tfdist.compression import error_feedback, on_servers
from tfdist.engines.parameter_server import server_calls
from tfdist.engines.parameter_server.transfer.encoding import Encoding
from tfdist.runtime.row_blocks import BLOCK_BYTES

# Server processes that are asked at the same time.
_THREADS = 16


def check_servers(num_workers: int, num_ps: int, timeout_secs: float) -> None:
    """Checks that codecs can be called in all server processes.

    Raises:
      RuntimeError: a server process was not started by tfdist; it is named.
      TimeoutError: a server process has not answered for `timeout_secs`.
    """
    tasks = [f"worker:{index}" for index in range(num_workers)] + [f"ps:{index}" for index in range(num_ps)]

    def check(task: str) -> str | None:
        try:
            server_calls.within(timeout_secs, task, lambda: server_calls.call(task, on_servers.probe_request()))
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
        return server_calls.within(
            self._timeout_secs, worker, lambda: server_calls.call(worker, request, *map(tf.constant, arrays))
        )

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
