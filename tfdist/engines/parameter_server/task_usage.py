# SPDX-License-Identifier: Apache-2.0
"""Counters of the worker and ps processes, such as the bytes that they have sent, fetched by the chief.

Each process samples itself (`serving/task_server`). The chief has its server return the newest sample: one small
operation on that server's CPU, in a thread of its own, which a server that stands still holds up alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.compat import closures
from tfdist.engines.parameter_server import server_calls
from tfdist.runtime.usage import USAGE_REQUEST, Usage

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
            usage = Usage.from_json(server_calls.call(task, USAGE_REQUEST).tobytes())
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
