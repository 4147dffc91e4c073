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

from tfdist.compat import closures, server_functions
from tfdist.compression import on_servers
from tfdist.engines.parameter_server.transfer.encoding import Encoding

# Server processes that are asked at the same time.
_THREADS = 16


def check_servers(num_workers: int, num_ps: int) -> None:
    """Checks that codecs can be called in all server processes.

    Raises:
      RuntimeError: a server process was not started by tfdist; it is named.
    """
    tasks = [f"worker:{index}" for index in range(num_workers)] + [f"ps:{index}" for index in range(num_ps)]

    def check(task: str) -> str | None:
        try:
            _call(task, on_servers.probe_request())
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


def collect(encoding: Encoding, coordinator: Any, num_workers: int, optimizers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Collects the state of all workers for a checkpoint.

    Args:
      encoding: of the strategy.
      coordinator: the `ClusterCoordinator` of the workers.
      num_workers: number of workers.
      optimizers: of the model; their order identifies them.

    Returns:
      A description (JSON data), and for each optimizer and worker one array, uint8; empty for a lost worker.
    """
    requests = [on_servers.collect_request(encoding.prefix_of(optimizer)) for optimizer in optimizers]

    def states_of(worker: int) -> list[np.ndarray]:
        return [_call(f"worker:{worker}", request) for request in requests]

    by_worker = _on_each(coordinator, range(num_workers), states_of)
    empty = [np.zeros(0, np.uint8)] * len(requests)
    arrays = [array for worker in range(num_workers) for array in by_worker.get(worker, empty)]
    return {"codec": repr(encoding.codec), "optimizers": len(requests)}, arrays


def distribute(
    encoding: Encoding,
    coordinator: Any,
    num_workers: int,
    optimizers: Sequence[Any],
    description: Any,
    arrays: Sequence[np.ndarray],
) -> bool:
    """Gives each worker its state from a checkpoint. The state of workers that are not there any more is dropped.

    Args:
      encoding: of the strategy.
      coordinator: the `ClusterCoordinator` of the workers.
      num_workers: number of workers.
      optimizers: of the model.
      description: result of `collect`.
      arrays: result of `collect`.

    Returns:
      False if the checkpoint is of another codec or of other optimizers: then the workers begin with empty states.
    """
    count = len(optimizers)
    if description != {"codec": repr(encoding.codec), "optimizers": count}:
        return False
    requests = [on_servers.restore_request(encoding.prefix_of(optimizer)) for optimizer in optimizers]

    def restore(worker: int) -> None:
        for request, saved in zip(requests, arrays[worker * count : (worker + 1) * count], strict=True):
            if saved.size:
                _call(f"worker:{worker}", request, tf.constant(saved, tf.uint8))

    saved_workers = len(arrays) // count if count else 0
    _on_each(coordinator, range(min(num_workers, saved_workers)), restore)
    return True


def _on_each(coordinator: Any, workers: Sequence[int], function: Callable[[int], Any]) -> dict[int, Any]:
    """Calls `function` for each worker that is not lost; returns the results of those that weren't lost meanwhile."""
    results = {}
    lost = closures.lost_workers(coordinator)
    for worker in workers:
        try:
            if worker not in lost:
                results[worker] = function(worker)
        except Exception as error:
            if not closures.is_task_failure(error):
                raise
            closures.clear_error()
    return results


def _call(task: str, request: bytes, *arguments: tf.Tensor) -> np.ndarray:
    job, _, index = task.partition(":")
    with tf.init_scope(), tf.device(f"/job:{job}/replica:0/task:{index}/device:CPU:0"):
        (answer,) = server_functions.call([tf.constant(request), *arguments], [tf.uint8])
    return answer.numpy()
