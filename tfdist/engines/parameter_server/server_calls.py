# SPDX-License-Identifier: Apache-2.0
"""Calls from the chief to the function of one server process (`compat/server_functions`).

A server that stands still holds up the calling thread alone: request and answer are copied by operations, which wait
without Python's lock, and not by NumPy, which keeps it.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import closures, server_functions
from tfdist.compat.cluster_joining import CHIEF_DEVICE


def call(task: str, request: bytes, *arguments: tf.Tensor) -> np.ndarray:
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
