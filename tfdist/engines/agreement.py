# SPDX-License-Identifier: Apache-2.0
"""Exchange of small values between the workers of a MultiWorkerMirroredStrategy, outside of TensorFlow's graphs.

The cluster's coordination service is a key-value store. All workers run the same script, so the n-th exchange is the
same on all of them. Its key has its name and n: workers that come to different exchanges never take each other's
values.

No wait for other workers continues when it can't end. Once a second a thread of each worker looks if the worker waits
in an exchange, in a sum (`joint`), or in a TensorFlow function with collectives. A worker that waits publishes its
`WorkerStatus`, and reads the others'. It fails its wait if `worker_waits.Waits` says that it can't end: an exchange or
a sum by an exception, TensorFlow's collectives by aborting them. A worker that ends publishes that, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import random
import re
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _forks
from tfdist.cluster import Task
from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import context
from tfdist.coordination import keepalive, lost_servers, stalls, usage, worker_waits
from tfdist.coordination.usage import Usage
from tfdist.coordination.worker_waits import WorkerStatus

# Timeout of one read from the service, during which Python can't deliver Ctrl-C.
_ASK_MS = 1000
# The same for a text that is replaced now and then.
_PEEK_MS = 100
# Time for a failed process to end.
_END_SECS = 3.0
# Time in which the service shows how a worker has ended whose connection is lost.
_EXPLAIN_SECS = 0.5
_MESSAGE_CHARS = 500
_LOOK_EVERY_SECS = 1.0
# With more workers than this they look less often, because each reads the states of all.
_WORKERS_PER_LOOK = 20
# On GPUs a step computes while the process is idle.
_IDLE_SECS_ON_GPU = 60.0
# At its end the chief, with which the service ends, waits so long for others that need nothing of it any more.
_FAREWELL_SECS = 10.0
_STATE_MS = 20
# Longest time that the others' counters are asked for.
_FETCH_SECS = 2.0
# Longest wait for a connection to a task, and for those to all.
_PROBE_SECS, _PROBES_SECS = 0.2, 1.0
_SEEDING = "agreeing on a random seed"
# Errors of TensorFlow's by which collectives end where other workers have ended or failed.
_ERRORS_OF_COLLECTIVES = (
    *(tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.CancelledError, tf.errors.InternalError),
    tf.errors.UnknownError,
)
# Their texts: another worker came with another collective, its process is gone, and which task that is.
_MISMATCH = re.compile(r"Collective instance \d+ expected|Shape mismatch in the collective instance")
_LOST = re.compile(r"[Cc]onnection re(?:set|fused)|[Ff]ailed to connect|Socket closed|Broken pipe")
_REMOTE = re.compile(r"remote target /job:(\w+)/replica:\d+/task:(\d+)")
# The service's text for a task that it has not heard of.
_SILENT = "heartbeat timeout"
# Number of an agreement's last exchanges that are published with its state.
_LOGGED = 8
_kept: list[Any] = []


@dataclasses.dataclass(eq=False)
class _Wait:
    """A wait of this process for other workers: the user's call, its part, and the tasks that are waited for.

    `failure` is why it can't end, once that is known; `part` is as in `WorkerStatus`.
    """

    call: str
    what: str
    number: int
    awaited: Sequence[Task]
    since: float
    part: str = ""
    failure: Exception | None = None


class Agreement:
    """Broadcast, gather and key-value store of the workers.

    Args:
      task: this worker.
      tasks: all workers, the chief first.
      addresses: where TensorFlow's server of each task listens, "host:port", as far as they are known.
    """

    def __init__(self, task: Task, tasks: Sequence[Task], addresses: Mapping[Task, str] = {}) -> None:
        self.task, self.tasks = task, tuple(tasks)
        self._addresses = dict(addresses)
        self._others = tuple(each for each in self.tasks if each != task)
        # Number of exchanges so far: the same on all workers between them.
        self.count = 0
        # Replaced, never changed: other threads read it. So do they `_waits`, of which they take copies.
        self._log: dict[int, str] = {}
        # True once the chief has made its first broadcast; time since when the service has not answered.
        self._has_answered = False
        self._silent_since: float | None = None
        # Returns True for an exception that the other workers know of without being told. TensorFlow's collectives tell
        # them of TensorFlow's errors; what came from another worker is known there.
        self.is_known: Callable[[BaseException], bool] = lambda error: isinstance(error, tf.errors.OpError)
        self.blocked = stalls.BlockedCall("a step, or another call that needs all workers,")
        self.reporter = stalls.StallReporter(self.waited_for, progress=self.blocked)
        # Waits of this worker, the innermost one last, and its calls outside of Keras' loops.
        self._waits: list[_Wait] = []
        self._calls: list[str] = []
        # The functions with collectives, by the line of the program that calls them.
        self._functions: dict[str, context.CollectiveFunction] = {}
        # Outcome of the program, once it has ended.
        self._ended, self._process = "", os.getpid()
        # Reason why collectives of TensorFlow's were aborted; taken by the code that meets the error.
        self.failure: Exception | None = None
        # Number of calls of `from_chief_at`, by place, and the key of the last one.
        self._numbers: collections.Counter[str] = collections.Counter()
        self._last_key = ""
        self._sample: Callable[[], Usage] | None = None
        self._usage_due, self._known_usage = 0.0, dict[str, Usage]()
        self._watch = _Watch(self)

    @property
    def is_chief(self) -> bool:
        """True on the chief."""
        return self.task == self.tasks[0]

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked copy of the program, which is no worker."""
        return os.getpid() == self._process

    def start(self, has_gpus: bool) -> None:
        """Starts to look after the waits of this worker, until the program ends."""
        self.reporter.start()
        self._watch.start(_IDLE_SECS_ON_GPU if has_gpus else 0.0)
        _forks.at_exit(self._leave)

    # Exchanges.

    def from_chief(self, value: Callable[[], Any], what: str, detail: str = "") -> Any:
        """Calls `value` on the chief only, and returns its result (JSON data) on every worker.

        Args:
          value: the function.
          what: name of the exchange, the same on all workers.
          detail: follows `what` in messages; may differ between workers.

        Raises:
          RuntimeError, OSError: `value` failed on the chief; the chief raises the original exception.
          ConnectionError: the chief has ended, or can't be reached.
        """
        number, key = self._next_key(what)
        if not self.is_chief:
            return self._receive(key, what, detail, number)
        return self._give([key], value)

    def gather(self, value: Any, what: str) -> dict[Task, Any]:
        """Returns the value (JSON data) of every worker.

        Raises:
          ConnectionError: a worker has ended, or can't be reached.
          RuntimeError: workers have come here from different calls, such as `evaluate` and `fit`.
        """
        number, key = self._next_key(what)
        self._set(f"{key}/{self.task}", [self.call(), value])
        found = {task: json.loads(self._get(f"{key}/{task}", what, number, [task])) for task in self.tasks}
        calls = {str(task): call for task, (call, _) in found.items()}
        if len(set(calls.values())) > 1:
            raise RuntimeError(worker_waits.parted(calls))
        return {task: value for task, (_, value) in found.items()}

    def meet(self, call: str, what: str) -> None:
        """Waits until all workers are in a call of the user's, such as a callback, that only some may have."""
        with self.calling(call):
            self.gather(None, what)

    def from_chief_at(self, place: str, name: str, value: Callable[[], Any], what: str) -> Any:
        """Like `from_chief`, in a call that the chief may also make alone: it has no number, and never waits.

        The others take the result of the chief's call of the same name at the same place of the program. That is
        `place` after the same number of exchanges; of several such calls, the n-th takes the result of the n-th. Where
        the chief has made no call of this name, that is its last call of any name, once this has ended.
        """
        place = f"{self.count}/{place}"
        named = f"{place}/{name}"
        self._numbers[place] += 1
        self._numbers[named] += 1
        number, key = self._numbers[place], _key_at(named, self._numbers[named])
        if self.is_chief:
            self._last_key = key
            self._set(_key_at(f"{place} begun", number), None)
            return self._give([key, _key_at(f"{place} ended", number)], value)

        def of_any_name() -> str | None:
            last = number
            while self._find(_key_at(f"{place} begun", last + 1)) is not None:
                last += 1
            return self._find(_key_at(f"{place} ended", last))

        try:
            return self._receive(key, what, otherwise=of_any_name)
        finally:
            with contextlib.suppress(tf.errors.OpError):
                self._set(f"{key}/{self.task}", None)

    def _receive(
        self,
        key: str,
        what: str,
        detail: str = "",
        number: int = 0,
        otherwise: Callable[[], str | None] = lambda: None,
    ) -> Any:
        shown = f"{what} {detail}" if detail else what
        result = json.loads(self._get(key, shown, number, self.tasks[:1], otherwise))
        if "error" in result:
            # The same kind on all workers, so that a script's `except OSError` works on all of them.
            kind = OSError if result["is_os_error"] else RuntimeError
            raise kind(f"{shown} failed on the chief, {self.tasks[0]}: {result['error']}")
        return result["value"]

    def _give(self, keys: Sequence[str], value: Callable[[], Any]) -> Any:
        try:
            result = value()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            for key in keys:
                self._set(key, {"error": text, "is_os_error": isinstance(error, OSError)})
            raise
        for key in keys:
            self._set(key, {"value": result})
        return result

    # Counters of all workers' processes, such as bytes sent.

    def share_usage(self, sample: Callable[[], Usage]) -> None:
        """Posts the counters of this process, as `sample` returns them, now and then every few seconds."""
        self._sample = sample
        self.post_usage()

    def post_usage(self) -> None:
        """Posts this worker's counters if that is due; called about once a second."""
        now = time.monotonic()
        if self._sample is not None and now >= self._usage_due:
            self._usage_due = now + usage.EVERY_SECS
            self.post(f"usage/{self.task}", self._sample().to_json())

    def usage(self) -> dict[str, Usage]:
        """Returns the counters of each worker that has posted some, by its name in reports; of this one as of now.

        Any thread may call it, at any time, without the other workers.
        """
        found: dict[str, Usage] = {}
        until = time.monotonic() + _FETCH_SECS
        for index, task in enumerate(self.tasks):
            if task == self.task and self._sample is not None:
                found[f"worker:{index}"] = self._sample()
            # Each answer of a chief that hangs takes its own time limit. The service ends with the program.
            elif not self._ended and time.monotonic() < until and (text := self.peek(f"usage/{task}")) is not None:
                found[f"worker:{index}"] = Usage.from_json(text)
        # One new dictionary: two threads may ask at a time.
        self._known_usage = {**self._known_usage, **found}
        return dict(sorted(self._known_usage.items(), key=lambda each: int(each[0].partition(":")[2])))

    # The key-value store.

    def publish(self, key: str, value: str) -> bool:
        """Stores text under a key for all workers; returns False if the key exists, or the service is gone."""
        try:
            context.set_key(f"tfdist/published/{key}", value)
        except tf.errors.OpError:
            return False
        return True

    def post(self, key: str, value: str) -> None:
        """Stores text under a key in place of what is there; does nothing if the service is gone. Thread-safe."""
        with contextlib.suppress(tf.errors.OpError):
            context.delete_key(f"tfdist/posted/{key}")
            context.set_key(f"tfdist/posted/{key}", value)

    def peek(self, key: str, timeout_ms: int = _PEEK_MS) -> str | None:
        """Returns the text that was posted under a key; None if there is none, or no service. Thread-safe."""
        return self._find(f"tfdist/posted/{key}", timeout_ms)

    def receive(self, key: str, timeout_secs: float) -> str | None:
        """Waits for the text that a worker publishes under `key`; returns None after the timeout. Thread-safe.

        Raises:
          ConnectionError: the service, which is the chief's, does not answer.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            try:
                return context.get_key(f"tfdist/published/{key}", max(1, int(1000 * min(left, 1))))
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError as error:
                raise self._service_lost(error) from None
        return None

    # Waits.

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Within the block this worker is in a call of the user's, such as "model.save"."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()

    @contextlib.contextmanager
    def joint(
        self, what: str = "", number: int = 0, awaited: Sequence[Task] | None = None, part: str = ""
    ) -> Iterator[None]:
        """Within the block this process waits for other workers, and calls `check` about once a second.

        Args:
          what: part of the user's call that is waited for; "" for a sum.
          number: of the exchange, if it has one.
          awaited: the tasks that are waited for; all others by default.
          part: of a sum, see `WorkerStatus`.
        """
        # Of a sum, which may be in a thread of TensorFlow's, the call is found if it is wanted.
        call, awaited = self.call() if what else "", self._others if awaited is None else awaited
        wait = _Wait(call, what, number, awaited, time.monotonic(), part)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def jointly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that waits for other workers, and `check_others` meanwhile, in a `joint` block."""

        def within(*args: Any) -> Any:
            # A step calls it in a thread of TensorFlow's.
            is_in_main = threading.current_thread() is threading.main_thread()
            with self.joint(part=worker_waits.OUTSIDE if is_in_main else worker_waits.STEP):
                return function(*args)

        return within

    def call(self, thread: threading.Thread | None = None) -> str:
        """Returns the user's call in which a thread is, by default this one; "" for none that is known."""
        return self._calls[0] if self._calls else calls.name(thread)

    def _main_call(self) -> str:
        return self.call(threading.main_thread())

    def check(self) -> None:
        """Raises the reason why this worker's wait can't end, once it is known; within a `joint` block."""
        for wait in self._waits[:]:
            if wait.failure is not None:
                raise wait.failure

    def failure_behind(self, error: BaseException) -> Exception | None:
        """Returns the reason for which a sum of TensorFlow's over all workers raised `error`, if it is known."""
        own = WorkerStatus(str(self.task), self._main_call())
        if isinstance(error, tf.errors.OpError) and (told := worker_waits.PARTED.search(str(error))):
            # The worker that saw it first has aborted the collectives, and says so before it ends.
            return self._watch.failed(told.group())
        if isinstance(error, tf.errors.OpError) and _MISMATCH.search(str(error)):
            return RuntimeError(worker_waits.mismatch(own))
        # Keras puts some errors into the text of its own.
        is_quoted = self.failure is not None and str(self.failure) in str(error)
        if not (is_quoted or isinstance(error, _ERRORS_OF_COLLECTIVES)):
            return None
        failure, self.failure = self.failure, None
        try:
            found = failure or self._watch.loss(own, self._others)
        except ConnectionError as loss:
            return loss
        peer = "" if found else self._lost_peer(str(error))
        return ConnectionError(worker_waits.never(own, {peer: worker_waits.LOST})) if peer else found

    def _lost_peer(self, text: str) -> str:
        """Returns the task whose connection is lost by an error of TensorFlow's, before its heartbeats are missed."""
        if not _LOST.search(text):
            return ""
        if len(self._others) == 1:
            return str(self._others[0])
        named = [f"{job}:{index}" for job, index in _REMOTE.findall(text)]
        known = {str(task) for task in self._others}
        return next((task for task in reversed(named) if task in known), "")

    def explain(self, loss: ConnectionError, lost: Sequence[str]) -> Exception:
        """Returns how the other workers have ended, in place of a lost connection; `loss` if it is not known.

        A worker that ends publishes its end before it closes its connections; one that is killed does not.

        Args:
          loss: the error of the connection.
          lost: names of the workers that it is about, if they are known.
        """
        own, deadline = WorkerStatus(str(self.task), self._main_call()), time.monotonic() + _EXPLAIN_SECS
        try:
            while (found := self._watch.loss(own, self._others)) is None and time.monotonic() < deadline:
                time.sleep(_PEEK_MS / 1000)
        except ConnectionError as service:
            return service
        killed = ConnectionError(worker_waits.never(own, dict.fromkeys(lost, worker_waits.LOST)))
        return found or (killed if lost else loss)

    def current_wait(self) -> _Wait | None:
        """Returns the innermost wait; in any thread."""
        waits = self._waits[:]
        return waits[-1] if waits else None

    def state(self, frame: FrameType | None = None, wait: _Wait | None = None) -> tuple[WorkerStatus, Sequence[Task]]:
        """Returns the state of this worker, and the tasks that it waits for; in any thread.

        Args:
          frame: the frame that is blocked in TensorFlow's runtime, if the main thread is, or waits for such a thread.
          wait: the wait to describe; the innermost one by default.
        """
        own = WorkerStatus(str(self.task), log=self._log, ended=self._ended)
        wait = wait or self.current_wait()
        if wait is not None:
            secs = time.monotonic() - wait.since
            # Operations that call Python do it in a thread of their own.
            call = wait.call or self._main_call()
            wanted = {"call": call, "what": wait.what, "number": wait.number, "part": wait.part}
            return dataclasses.replace(own, **wanted, blocked_secs=secs), wait.awaited
        runs = stalls.RuntimeCall() if frame is None else stalls.runtime_call(frame)
        operation, function = runs.operation, self._functions.get(runs.line)
        # While a function is traced it waits for nobody, and not all of its collectives are known.
        if not operation and (function is None or runs.is_tracing):
            return own, ()
        # Keras' step is a function; other sums of a call, such as those of metrics, are operations.
        if operation or function is None:
            part = worker_waits.OUTSIDE
            what = worker_waits.A_VARIABLE if operation.startswith("collective_bcast") else worker_waits.A_SUM
        else:
            part, what = worker_waits.step_of(function.collectives), function.name
        return dataclasses.replace(own, call=self._main_call() or what, part=part), self._others

    def note_traced(self, graph: Any) -> None:
        """Notes that a function that the main thread calls has collectives; called while its graph is traced."""
        main = threading.main_thread()
        line = stalls.runtime_call(None if threading.current_thread() is main else stalls.of(main)).line
        if line and graph is not None and (line not in self._functions or self._functions[line].graph() is not graph):
            self._functions[line] = context.CollectiveFunction(graph)

    def waited_for(self) -> str:
        """Returns the names of the other workers that don't wait themselves."""
        names = [str(task) for task in self._others]
        waiting = {task for task in names if (state := self._watch.read(task)) and state.blocked_secs}
        return ", ".join(name for name in names if name not in waiting) or ", ".join(names)

    def check_others(self) -> None:
        """Raises ConnectionError, with the names, if other workers have ended or failed, or as `check` does."""
        self.check()
        lost = self.lost()
        if lost:
            raise ConnectionError(worker_waits.never(WorkerStatus(str(self.task)), lost))

    def lost(self) -> dict[str, str]:
        """Returns how other workers have failed, by name, as far as the service knows.

        Raises:
          ConnectionError: the service does not answer.
        """
        if not self.service_answers():
            return {}
        try:
            states = context.errors_of_tasks(collections.Counter(task.type for task in self.tasks))
        except tf.errors.OpError as error:
            raise self._service_lost(error) from None
        return {
            task: worker_waits.LOST if _SILENT in text else text
            for task, text in states.items()
            if task != str(self.task)
        }

    def gone(self, tasks: Sequence[Task]) -> list[str]:
        """Returns those of the tasks whose process has ended: their hosts refuse connections. Takes a second at most.

        The service knows of such a task only once its heartbeats have been missing for 10 s.
        """
        until, found = time.monotonic() + _PROBES_SECS, []
        for task in tasks:
            if task in self._addresses and time.monotonic() < until:
                found += [str(task)] if lost_servers.is_refused(self._addresses[task], _PROBE_SECS) else []
        return found

    def service_answers(self) -> bool:
        """Returns False if the service does not answer now; raises ConnectionError if it has not for long.

        The request for the others' states has no time limit, and blocks Python meanwhile. So this one, which has, comes
        before it. All know its answer: the chief's first broadcast, which stays.
        """
        now = time.monotonic()
        try:
            context.get_key(_key(1, _SEEDING), _ASK_MS)
        except tf.errors.DeadlineExceededError:
            if not self._has_answered:
                return False
            self._silent_since = self._silent_since or now
            if now - self._silent_since < keepalive.LOST_SECS:
                return False
            own, _ = self.state()
            text = f"it has the coordination service, and has not answered for {keepalive.LOST_SECS:g} s"
            raise ConnectionError(worker_waits.never(own, {str(self.tasks[0]): text})) from None
        except tf.errors.OpError as error:
            raise self._service_lost(error) from None
        self._silent_since, self._has_answered = None, True
        return True

    def _service_lost(self, error: tf.errors.OpError) -> ConnectionError:
        own, reason = self.state()[0], str(error).partition("\n")[0]
        is_gone, text = isinstance(error, tf.errors.UnavailableError), f"its coordination service fails: {reason}"
        return ConnectionError(worker_waits.never(own, {str(self.tasks[0]): worker_waits.LOST if is_gone else text}))

    def _next_key(self, what: str) -> tuple[int, str]:
        self.count += 1
        shown = f"{call} ({what})" if (call := self.call()) else what
        last = list(self._log.items())[1 - _LOGGED :]
        self._log = dict([*last, (self.count, shown)])
        return self.count, _key(self.count, what)

    def _set(self, key: str, value: Any) -> None:
        context.set_key(key, json.dumps(value))

    def _find(self, key: str, timeout_ms: int = _STATE_MS) -> str | None:
        try:
            return context.get_key(key, timeout_ms)
        except tf.errors.OpError:
            return None

    def _get(
        self,
        key: str,
        what: str,
        number: int,
        awaited: Sequence[Task],
        otherwise: Callable[[], str | None] = lambda: None,
    ) -> str:
        with self.joint(what, number, awaited), self.reporter.waiting(what):
            while True:
                try:
                    found = context.get_key(key, _ASK_MS)
                    self._has_answered = True
                    return found
                except tf.errors.DeadlineExceededError:
                    if (other := otherwise()) is not None:
                        return other
                    self.check()
                except tf.errors.OpError as error:
                    raise self._service_lost(error) from None

    # The end of the program.

    def end(self, how: str = worker_waits.HAS_ENDED) -> None:
        """Tells the other workers that this one makes no more calls; done at the end of the program."""
        if self._ended or not self.is_of_this_process:
            return
        self._ended = how
        with contextlib.suppress(ConnectionError):
            # Storing has no time limit.
            if self.service_answers():
                self._watch.end(how)

    def close(self) -> None:
        """Ends the threads, after which this worker makes no more calls; may be called again."""
        self.end()
        self._watch.stop()
        self.reporter.stop()
        self.blocked.forget()

    def _leave(self) -> None:
        self.end()
        if self.is_chief and self._ended == worker_waits.HAS_ENDED:
            self._await_others()
        self.close()

    def _await_others(self) -> None:
        """Waits at the end of the chief's program, because the service ends with it.

        Others that have not read the result of the last `from_chief_at` are waited for until they have, or have ended.
        """
        until, checked = time.monotonic() + _FAREWELL_SECS, 0.0
        pending = {str(task) for task in self._others}
        with self.reporter.waiting("the end of the program"), contextlib.suppress(ConnectionError):
            while pending:
                now = time.monotonic()
                if now - checked >= _LOOK_EVERY_SECS:
                    pending, checked = pending - self.lost().keys(), now
                pending = {task for task in pending if not self._is_served(task, now > until)}
                time.sleep(0.05 if pending else 0.0)

    def _is_served(self, task: str, is_late: bool) -> bool:
        state = self._watch.read(task)
        if state is not None and state.ended:
            return True
        return is_late and (not self._last_key or self._find(f"{self._last_key}/{task}", 1) is not None)


class _Watch:
    """Publishes this worker's status while it waits, and fails waits that can't end; see the module's docstring."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._others = [str(task) for task in agreement.tasks if task != agreement.task]
        # The main thread ends it, and takes its reasons; another one looks.
        self._lock, self._has_ended = threading.Lock(), False
        self._waits = worker_waits.Waits(str(agreement.task), self._others)
        self._idle_secs = 0.0
        self._idleness = stalls.Idleness()
        self._token, self._since = -1, 0.0
        self._has_aborted = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist workers", daemon=True)

    def start(self, idle_secs: float) -> None:
        """Starts the thread; a collective counts as a wait once the process has been idle for `idle_secs` longer."""
        self._idle_secs = idle_secs
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECS)

    def end(self, how: str) -> None:
        """Publishes how the program has ended; nothing is published after it."""
        with self._lock:
            self._has_ended = True
            self._post(WorkerStatus(str(self._agreement.task), ended=how))

    def read(self, task: str) -> WorkerStatus | None:
        """Returns the last status that a worker has published; None if there is none."""
        text = self._agreement.peek(f"state/{task}", _STATE_MS)
        return None if text is None else WorkerStatus.from_json(text)

    def loss(self, own: WorkerStatus, awaited: Sequence[Task]) -> Exception | None:
        """Returns an exception that names those of the awaited tasks that have ended or failed; None if none has.

        Raises:
          ConnectionError: the service does not answer.
        """
        names = [str(task) for task in awaited]
        with self._lock:
            self._hear(names)
            reason = self._waits.reason(names, own)
        lost = {} if reason else {task: text for task, text in self._agreement.lost().items() if task in names}
        if not reason and not lost:
            lost = dict.fromkeys(self._agreement.gone(awaited), worker_waits.LOST)
        if lost:
            reason = worker_waits.never(own, lost)
        return self.failed(reason) if reason else None

    def failed(self, reason: str) -> Exception:
        """Returns the exception for a wait that can't end."""
        self._waits.failed(time.monotonic())
        return RuntimeError(reason) if worker_waits.PARTED.match(reason) else ConnectionError(reason)

    def _post(self, status: WorkerStatus) -> None:
        self._agreement.post(f"state/{status.task}", status.to_json())

    def _hear(self, tasks: Sequence[str]) -> None:
        for task in tasks:
            if (status := self.read(task)) is not None:
                self._waits.hear(status)

    def _run(self) -> None:
        every = max(_LOOK_EVERY_SECS, len(self._others) / _WORKERS_PER_LOOK)
        while not self._stopped.wait(every):
            # A look that fails says nothing about the others; the next one may. Nothing else ends a wait.
            with contextlib.suppress(Exception):
                self._look()
            with contextlib.suppress(Exception):
                self._agreement.post_usage()

    def _look(self) -> None:
        frame = self._blocked_frame()
        wait = self._agreement.current_wait()
        own, awaited = self._agreement.state(frame, wait)
        in_collective = not own.blocked_secs and bool(awaited)
        if in_collective:
            own = dataclasses.replace(own, blocked_secs=time.monotonic() - self._since - self._idle_secs)
        try:
            error = self._error(own, awaited)
        except ConnectionError as loss:
            error = loss
        if error is None:
            return
        if not in_collective and wait is not None:
            # Of this wait only: if it has ended meanwhile, the reason must not end another one.
            wait.failure = wait.failure or error
        elif in_collective and not self._has_aborted:
            self._has_aborted = True
            self._agreement.failure = error
            with contextlib.suppress(tf.errors.OpError):
                context.abort_collectives(str(error))

    def _error(self, own: WorkerStatus, awaited: Sequence[Task]) -> Exception | None:
        with self._lock:
            status, is_waiting = self._waits.look(own, time.monotonic())
            if status is not None and not self._has_ended and (not is_waiting or self._agreement.service_answers()):
                self._post(status)
            if not is_waiting:
                return None
            self._hear(self._others)
            reason = self._waits.reason([str(task) for task in awaited])
        return self.failed(reason) if reason else self.loss(own, awaited)

    def _blocked_frame(self) -> FrameType | None:
        """Returns the main thread's frame if it has been blocked in TensorFlow and the process idle for a while."""
        blocked = self._agreement.blocked
        is_idle, call, now = self._idleness.check(), blocked(), time.monotonic()
        if call is None or call[1] != self._token or not is_idle:
            self._token, self._since = call[1] if call else -1, now
        is_long = call is not None and now - self._since >= worker_waits.LOOK_AFTER_SECS
        return blocked.frame if is_long else None


def tell_others_of_errors(agreement: Agreement) -> None:
    """Lets an exception that ends this process end the others too, at once and with its message.

    Such a process ends for sure: TensorFlow, taken down with its cluster in error, now and then waits for ever.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if agreement.is_of_this_process and threading.current_thread() is threading.main_thread():
            # One line in place of TensorFlow's many.
            with contextlib.suppress(Exception):
                error = agreement.failure_behind(error) or error
            kind = type(error)
            # One line, because TensorFlow logs it on each worker.
            text = " ".join(str(error).split())[:_MESSAGE_CHARS]
            message = f"{agreement.task} ended with {kind.__name__}: {text}"
            with contextlib.suppress(Exception):
                agreement.end(message)
                if not agreement.is_known(error):
                    context.report_error(message)
        previous(kind, error, trace)
        end_soon_after_exit()

    sys.excepthook = hook


def end_soon_after_exit() -> None:
    """From the moment on at which the program is over, its process ends within `_END_SECS`.

    TensorFlow's end in a cluster of which others go on takes 10 s now and then, and they go on waiting meanwhile.
    """
    _forks.at_exit(_end_within, _END_SECS)


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
    state = agreement.from_chief(_random_state, _SEEDING)
    if state["is_drawn"]:
        context.set_drawn_seed(state["tensorflow"])
    elif context.global_seed() != state["tensorflow"]:
        tf.random.set_seed(state["tensorflow"])
    if not agreement.is_chief:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, words, *rest = state["numpy"]
        np.random.set_state((name, np.array(words, np.uint32), *rest))
    return state["tensorflow"]


def _random_state() -> dict[str, Any]:
    seed = context.global_seed()
    name, words, *rest = np.random.get_state()
    return {
        "tensorflow": secrets.randbelow(2**31) if seed is None else int(seed),
        "is_drawn": seed is None or context.is_drawn_seed(seed),
        "python": random.getstate(),
        "numpy": [name, words.tolist(), *rest],
    }


def _key(number: int, what: str) -> str:
    return f"tfdist/{number}/{zlib.crc32(what.encode()):08x}"


def _key_at(place: str, number: int) -> str:
    return f"tfdist/at/{zlib.crc32(place.encode()):08x}/{number}"
