# SPDX-License-Identifier: Apache-2.0
"""Exchange of small values between the workers of a MultiWorkerMirroredStrategy, outside of TensorFlow's graphs.

The cluster's coordination service is a key-value store. All workers run the same script, so the n-th exchange is the
same on all of them, and n is part of its key.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import pathlib
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import Task
from tfdist.compat import eager_context
from tfdist.runtime import stalls

# Timeout of one read from the service, during which Python can't deliver Ctrl-C.
_ASK_MS = 1000
# The same for a text that is replaced now and then.
_PEEK_MS = 100
_STATE_EVERY_CHECKS = 5
# The service is lost if it does not answer for so long; as long as it waits for a worker's heartbeats itself.
_SERVICE_SECS = 10.0
# Time for a failed process to end.
_END_SECS = 3.0
_MESSAGE_CHARS = 500
_kept: list[Any] = []


class Agreement:
    """Broadcast, gather and key-value store of the workers.

    Args:
      task: this worker.
      tasks: all workers, the chief first.
    """

    def __init__(self, task: Task, tasks: Sequence[Task]) -> None:
        self.task, self.tasks = task, tuple(tasks)
        self._count = 0
        self._checks = 0
        self._silent_since: float | None = None
        # Returns True for an exception that the other workers know of without being told. TensorFlow's collectives tell
        # them of TensorFlow's errors; what came from another worker is known there.
        self.is_known: Callable[[BaseException], bool] = lambda error: isinstance(error, tf.errors.OpError)
        self._blocked = stalls.BlockedCall("a step, or another call that needs all workers,")
        self.reporter = stalls.StallReporter(self.waited_for, progress=self._progress)

    @property
    def is_chief(self) -> bool:
        """True on the chief."""
        return self.task == self.tasks[0]

    def from_chief(self, value: Callable[[], Any], what: str) -> Any:
        """Calls `value` on the chief only, and returns its result (JSON data) on every worker.

        Raises:
          RuntimeError, OSError: `value` failed on the chief; the chief raises the original exception.
        """
        key = self._next_key()
        if not self.is_chief:
            result = json.loads(self._get(key, what))
            if "error" in result:
                # The same kind on all workers, so that a script's `except OSError` works on all of them.
                kind = OSError if result["is_os_error"] else RuntimeError
                raise kind(f"{what} failed on the chief, {self.tasks[0]}: {result['error']}")
            return result["value"]
        try:
            result = value()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self._set(key, {"error": text, "is_os_error": isinstance(error, OSError)})
            raise
        self._set(key, {"value": result})
        return result

    def confirm(self, what: str) -> None:
        """Has the chief wait until all others have called this: a program may end after it, and its service with it."""
        key = self._next_key()
        if not self.is_chief:
            self._set(f"{key}/{self.task}", None)
            return
        for task in self.tasks[1:]:
            self._get(f"{key}/{task}", what)

    def gather(self, value: Any, what: str) -> dict[Task, Any]:
        """Returns the value (JSON data) of every worker."""
        key = self._next_key()
        self._set(f"{key}/{self.task}", value)
        return {task: json.loads(self._get(f"{key}/{task}", what)) for task in self.tasks}

    def publish(self, key: str, value: str) -> bool:
        """Stores text under a key for all workers; returns False if the key exists, or the service is gone."""
        try:
            eager_context.set_key(f"tfdist/published/{key}", value)
        except tf.errors.OpError:
            return False
        return True

    def post(self, key: str, value: str) -> None:
        """Stores text under a key in place of what is there; does nothing if the service is gone. Thread-safe."""
        with contextlib.suppress(tf.errors.OpError):
            eager_context.delete_key(f"tfdist/posted/{key}")
            eager_context.set_key(f"tfdist/posted/{key}", value)

    def peek(self, key: str) -> str | None:
        """Returns the text that was posted under a key; None if there is none, or no service. Thread-safe."""
        try:
            return eager_context.get_key(f"tfdist/posted/{key}", _PEEK_MS)
        except tf.errors.OpError:
            return None

    def receive(self, key: str, timeout_secs: float) -> str | None:
        """Waits for the text that a worker publishes under `key`; returns None after the timeout. Thread-safe.

        Raises:
          ConnectionError: the service, which is the chief's, does not answer.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            try:
                return eager_context.get_key(f"tfdist/published/{key}", max(1, int(1000 * min(left, 1))))
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError as error:
                raise ConnectionError(f"the coordination service of {self.tasks[0]} does not answer: {error}") from None
        return None

    def waited_for(self) -> str:
        """Returns the names of the other workers that don't wait themselves."""
        others = [task for task in self.tasks if task != self.task]
        with contextlib.suppress(tf.errors.OpError):
            return ", ".join(str(task) for task in others if not self._is_waiting(task)) or _all(others)
        return _all(others)

    def check_others(self) -> None:
        """Raises ConnectionError, with the names, if other workers have ended or failed."""
        if not self._service_answers():
            return
        jobs = {job: sum(task.type == job for task in self.tasks) for job in dict.fromkeys(t.type for t in self.tasks)}
        try:
            states = eager_context.errors_of_tasks(jobs)
        except tf.errors.OpError as error:
            raise ConnectionError(f"the coordination service of {self.tasks[0]} does not answer: {error}") from None
        lost = {task: text for task, text in states.items() if task != str(self.task)}
        if lost:
            shown = "; ".join(f"{task} ({text})" for task, text in lost.items())
            raise ConnectionError(f"a sum over all workers will never come, as some have ended or failed: {shown}")

    def _service_answers(self) -> bool:
        """Returns False if the service does not answer now; raises ConnectionError if it has not for long.

        The question for the others' states has no time limit, and Python stands still meanwhile. So this one, which
        has, comes before it. All know its answer: the chief's first broadcast, which stays.
        """
        now = time.monotonic()
        try:
            eager_context.get_key(_key(1), _ASK_MS)
        except tf.errors.DeadlineExceededError:
            self._silent_since = self._silent_since or now
            if now - self._silent_since < _SERVICE_SECS:
                return False
            raise ConnectionError(
                f"a sum over all workers will never come: {self.tasks[0]}, which has the coordination service, has not "
                f"answered for {_SERVICE_SECS:g} s"
            ) from None
        except tf.errors.OpError as error:
            raise ConnectionError(f"the coordination service of {self.tasks[0]} does not answer: {error}") from None
        self._silent_since = None
        return True

    def _is_waiting(self, task: Task) -> bool:
        try:
            return json.loads(eager_context.get_key(_state_key(task), _ASK_MS))
        except tf.errors.DeadlineExceededError:
            return False

    def _progress(self) -> tuple[str, Any] | None:
        """Progress of this worker, for the stall reporter; every few calls it also publishes if this worker waits."""
        self._checks += 1
        if self._checks % _STATE_EVERY_CHECKS == 0:
            with contextlib.suppress(tf.errors.OpError):
                eager_context.delete_key(_state_key(self.task))
                is_waiting = self.reporter.stalled_secs() >= _STATE_EVERY_CHECKS
                eager_context.set_key(_state_key(self.task), json.dumps(is_waiting))
        return self._blocked()

    def _next_key(self) -> str:
        self._count += 1
        return _key(self._count)

    def _set(self, key: str, value: Any) -> None:
        eager_context.set_key(key, json.dumps(value))

    def _get(self, key: str, what: str) -> str:
        with self.reporter.waiting(what):
            while True:
                try:
                    return eager_context.get_key(key, _ASK_MS)
                except tf.errors.DeadlineExceededError:
                    continue


def tell_others_of_errors(agreement: Agreement) -> None:
    """Lets an exception that ends this process end the others too, at once and with its message.

    Such a process ends for sure: TensorFlow, taken down with its cluster in error, now and then waits for ever.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not agreement.is_known(error):
            with contextlib.suppress(Exception):
                # One line, because TensorFlow logs it on each worker.
                text = " ".join(str(error).split())[:_MESSAGE_CHARS]
                message = f"{agreement.task} ended with {kind.__name__}: {text}"
                eager_context.report_error(message)
        previous(kind, error, trace)
        end_soon_after_exit()

    sys.excepthook = hook


def end_soon_after_exit() -> None:
    """From the moment on at which the program is over, its process ends within `_END_SECS`.

    TensorFlow's end in a cluster of which others go on takes 10 s now and then, and they go on waiting meanwhile.
    """
    atexit.register(_end_within, _END_SECS)


def _end_within(secs: float) -> None:
    # Of all timers, this one needs no running interpreter, nor its lock. What it writes is of no use to anybody.
    nowhere = pathlib.Path(os.devnull).open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(secs, exit=True, file=nowhere)
    _kept.append(nowhere)


def share_random_state(agreement: Agreement) -> int:
    """Gives all workers the chief's random state, so that unseeded shuffles are the same everywhere.

    TensorFlow's global seed is drawn if the chief has set none; Python's and NumPy's generators take its state.

    Returns:
      TensorFlow's global seed.
    """
    state = agreement.from_chief(_random_state, "agreeing on a random seed")
    if eager_context.global_seed() != state["tensorflow"]:
        tf.random.set_seed(state["tensorflow"])
    if not agreement.is_chief:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.array(words, np.uint32), *rest))
    return state["tensorflow"]


def _random_state() -> dict[str, Any]:
    seed = eager_context.global_seed()
    name, words, *rest = np.random.get_state()
    return {
        "tensorflow": secrets.randbelow(2**31) if seed is None else int(seed),
        "python": random.getstate(),
        "numpy": [name, words.tolist(), *rest],
    }


def _key(number: int) -> str:
    return f"tfdist/{number}"


def _state_key(task: Task) -> str:
    return f"tfdist/waiting/{task}"


def _all(tasks: Sequence[Task]) -> str:
    return ", ".join(map(str, tasks))
