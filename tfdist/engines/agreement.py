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
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tfdist import _sockets
from tfdist.cluster import Task
from tfdist.compat.keras import calls
from tfdist.compat.tensorflow import context
from tfdist.coordination import keepalive, lost_servers, stalls, worker_waits
from tfdist.coordination.worker_waits import WorkerStatus

# Timeout of one read from the service, during which Python can't deliver Ctrl-C; and of text that may not be there.
_ASK_MS, _PEEK_MS = 1000, 20
# Time in which the thread ends.
_END_SECS = 3.0
# Time in which the service, or the port of its host, shows how a worker has ended whose connection is lost.
_EXPLAIN_SECS = 0.5
# Longer, if the text of an error tells whom it is about.
_LOST_SECS = 2.0
_LOOK_EVERY_SECS = 1.0
# With more workers than this they look less often, because each reads the states of all.
_WORKERS_PER_LOOK = 20
# On GPUs a step computes while the process is idle.
_IDLE_SECS_ON_GPU = 60.0
# The first exchange, whose text stays.
SEEDING = "agreeing on a random seed"
# Errors of TensorFlow's by which collectives end where other workers have ended or failed.
_ERRORS_OF_COLLECTIVES = (
    *(tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.CancelledError, tf.errors.InternalError),
    tf.errors.UnknownError,
)
# Their text where another worker came with another collective.
_MISMATCH = re.compile(r"Collective instance \d+ expected|Shape mismatch in the collective instance")
_LOST = re.compile(r"[Cc]onnection re(?:set|fused)|[Ff]ailed to connect|Socket closed|Broken pipe")
_REMOTE = re.compile(r"remote target /job:(\w+)/replica:\d+/task:(\d+)")
# The service's text for a task that it has not heard of.
_SILENT = "heartbeat timeout"
_Find = Callable[[], str | None]


@dataclasses.dataclass(eq=False)
class _Wait:
    """A wait of this process for other workers; `failure` is why it can't end, once that is known."""

    status: WorkerStatus
    awaited: Sequence[Task]
    since: float
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
        self._addresses = {str(each): address for each, address in addresses.items()}
        self._others = tuple(each for each in self.tasks if each != task)
        # Number of exchanges so far: the same on all workers between them.
        self.count = 0
        # Time since when the service has not answered.
        self._silent_since: float | None = None
        # Returns True for an exception that the other workers know of without being told. TensorFlow's collectives tell
        # them of TensorFlow's errors; what came from another worker is known there.
        self.is_known: Callable[[BaseException], bool] = lambda error: isinstance(error, tf.errors.OpError)
        self.blocked = stalls.BlockedCall("a step, or another call that needs all workers,")
        self.reporter = stalls.StallReporter(self.waited_for, progress=self.blocked)
        # Waits of this worker, the innermost one last, and its calls outside of Keras' loops. Other threads copy them.
        self._waits: list[_Wait] = []
        self._calls: list[str] = []
        # The functions with collectives, by the line of the program that calls them.
        self._functions: dict[str, context.CollectiveFunction] = {}
        # Outcome of the program, once it has ended.
        self.ended, self._process = "", os.getpid()
        # Reason why collectives of TensorFlow's were aborted; taken by the code that meets the error.
        self.failure: Exception | None = None
        # Number of calls of `from_chief_at`, by place; others may come for their results later.
        self.numbers: collections.Counter[str] = collections.Counter()
        # Called once a second.
        self.on_look: Callable[[], object] = lambda: None
        # The main thread publishes the end, and takes reasons; another one looks.
        self._lock = threading.Lock()
        self._all_waits = worker_waits.Waits([str(each) for each in self._others])
        self._idle_secs = 0.0
        self._idleness = stalls.Idleness()
        self._blocked_token, self._blocked_since = -1, 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist workers", daemon=True)

    @property
    def is_chief(self) -> bool:
        """True on the chief."""
        return self.task == self.tasks[0]

    def start(self, has_gpus: bool) -> None:
        """Starts to look after the waits of this worker, until the program ends; after the first exchange."""
        self._idle_secs = _IDLE_SECS_ON_GPU if has_gpus else 0.0
        self.reporter.start()
        self._thread.start()

    # Exchanges.

    def from_chief(self, value: Callable[[], Any], what: str) -> Any:
        """Calls `value` on the chief only, and returns its result (JSON data) on every worker.

        Args:
          value: the function.
          what: name of the exchange, the same on all workers.

        Raises:
          RuntimeError, OSError: `value` failed on the chief; the chief raises the original exception.
          ConnectionError: the chief has ended, or can't be reached.
        """
        number, key = self._next_key(what)
        return self._give(value, key) if self.is_chief else self._receive(key, what, number)

    def gather(self, value: Any, what: str) -> dict[Task, Any]:
        """Returns the value (JSON data) of every worker.

        Raises:
          ConnectionError: a worker has ended, or can't be reached.
          RuntimeError: workers have come here from different calls, such as `evaluate` and `fit`.
        """
        number, key = self._next_key(what)
        context.set_key(f"{key}/{self.task}", json.dumps([self.call(), value]))
        found = {task: json.loads(self._get(f"{key}/{task}", what, number, [task])) for task in self.tasks}
        calls = {str(task): call for task, (call, _) in found.items()}
        if len(set(calls.values())) > 1:
            raise RuntimeError(worker_waits.parted(calls))
        return {task: value for task, (_, value) in found.items()}

    def from_chief_at(self, place: str, name: str, value: Callable[[], Any], what: str) -> Any:
        """Like `from_chief`, in a call that the chief may also make alone: it has no number, and never waits.

        The others take the result of the chief's call of the same name at the same place of the program. That is
        `place` after the same number of exchanges; of several such calls, the n-th takes the result of the n-th. Where
        the chief has made no call of this name, that is its last call of any name, once this has ended.
        """
        place = f"tfdist/at/{self.count}/{place}"
        named = f"{place}/named/{name}"
        self.numbers.update((place, named))
        number, key = self.numbers[place], f"{named}/{self.numbers[named]}"
        if self.is_chief:
            context.set_key(f"{place}/begun/{number}", json.dumps(None))
            return self._give(value, key, f"{place}/ended/{number}")

        def of_any_name() -> str | None:
            last = number
            while self._ask(f"{place}/begun/{last + 1}", _PEEK_MS) is not None:
                last += 1
            return self._ask(f"{place}/ended/{last}", _PEEK_MS)

        return self._receive(key, what, otherwise=of_any_name)

    def _receive(self, key: str, what: str, number: int = 0, otherwise: _Find = lambda: None) -> Any:
        result = json.loads(self._get(key, what, number, self.tasks[:1], otherwise))
        if "error" in result:
            # The same kind on all workers, so that a script's `except OSError` works on all of them.
            kind = OSError if result["is_os_error"] else RuntimeError
            raise kind(f"{what} failed on the chief, {self.tasks[0]}: {result['error']}")
        return result["value"]

    def _give(self, value: Callable[[], Any], *keys: str) -> Any:
        try:
            result = {"value": value()}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "is_os_error": isinstance(error, OSError)}
            raise
        finally:
            for key in keys:
                context.set_key(key, json.dumps(result))
        return result["value"]

    # The key-value store.

    def publish(self, key: str, value: str) -> None:
        """Stores text under a key for all workers; does nothing if the key exists, or the service is gone."""
        with contextlib.suppress(tf.errors.OpError):
            context.set_key(f"tfdist/published/{key}", value)

    def post(self, key: str, value: str) -> None:
        """Stores text under a key in place of what is there; does nothing if the service is gone. Thread-safe."""
        with contextlib.suppress(tf.errors.OpError):
            context.delete_key(f"tfdist/posted/{key}")
            context.set_key(f"tfdist/posted/{key}", value)

    def peek(self, key: str) -> str | None:
        """Returns the text that was posted under a key; None if there is none, or no service. Thread-safe."""
        with contextlib.suppress(tf.errors.OpError):
            return context.get_key(f"tfdist/posted/{key}", _PEEK_MS)

    def receive(self, key: str, timeout_secs: float) -> str | None:
        """Waits for the text that a worker publishes under `key`; returns None after the timeout. Thread-safe.

        Raises:
          ConnectionError: the service, which is the chief's, does not answer.
        """
        deadline = time.monotonic() + timeout_secs
        while (left := deadline - time.monotonic()) > 0:
            found = self._ask(f"tfdist/published/{key}", max(1, min(int(1000 * left), _ASK_MS)))
            if found is not None:
                return found
        return None

    def _next_key(self, what: str) -> tuple[int, str]:
        self.count += 1
        return self.count, f"tfdist/{self.count}/{what}"

    def _get(self, key: str, what: str, number: int, awaited: Sequence[Task], otherwise: _Find = lambda: None) -> str:
        with self.joint(what, number, awaited), self.reporter.waiting(what):
            while (found := self._ask(key, _ASK_MS) or otherwise()) is None:
                self.check()
            return found

    def _ask(self, key: str, timeout_ms: int) -> str | None:
        """Returns the text under a key, None if there is none yet; raises ConnectionError if the service is gone."""
        try:
            return context.get_key(key, timeout_ms)
        except tf.errors.DeadlineExceededError:
            return None
        except tf.errors.OpError as error:
            raise self._service_lost(error) from None

    def _service_lost(self, error: tf.errors.OpError) -> ConnectionError:
        is_gone, reason = isinstance(error, tf.errors.UnavailableError), str(error).partition("\n")[0]
        return self._chief_lost(worker_waits.LOST if is_gone else f"its coordination service fails: {reason}")

    def _chief_lost(self, reason: str) -> ConnectionError:
        return ConnectionError(worker_waits.never(self.state()[0], {str(self.tasks[0]): reason}))

    # Waits.

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Within the block this worker is in a call of the user's, such as a callback that only some may have."""
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
        status = WorkerStatus(str(self.task), self.call() if what else "", what, number, part=part)
        wait = _Wait(status, self._others if awaited is None else awaited, time.monotonic())
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def call(self, thread: threading.Thread | None = None) -> str:
        """Returns the user's call in which a thread is, by default this one; "" for none that is known."""
        return self._calls[0] if self._calls else calls.name(thread)

    def check(self) -> None:
        """Raises the reason why this worker's wait can't end, once it is known; within a `joint` block."""
        for wait in self._waits[:]:
            if wait.failure is not None:
                raise wait.failure

    def failure_behind(self, error: BaseException, lost: Sequence[str] | None = None) -> Exception | None:
        """Returns the reason for which a wait for all workers raised `error`, if it is known.

        A worker that ends publishes its end before it closes its connections; one that is killed does not.

        Args:
          error: the error, such as one of a sum of TensorFlow's.
          lost: of an error that is about lost connections, the names of the workers, as far as they are known.
        """
        own = WorkerStatus(str(self.task), self.call(threading.main_thread()))
        if isinstance(error, tf.errors.OpError) and (told := worker_waits.PARTED.search(str(error))):
            # The worker that saw it first has aborted the collectives, and says so before it ends.
            return self._failed(told.group())
        if isinstance(error, tf.errors.OpError) and _MISMATCH.search(str(error)):
            return RuntimeError(worker_waits.mismatch(own))
        # Keras puts some errors into the text of its own.
        is_quoted = self.failure is not None and str(self.failure) in str(error)
        if lost is None and not is_quoted and not isinstance(error, _ERRORS_OF_COLLECTIVES):
            return None
        found, self.failure = self.failure, None
        # The host of a peer may be gone without a refusal, before the peer's heartbeats are missed.
        lost = lost or self._lost_peer(str(error))
        deadline = time.monotonic() + (_LOST_SECS if lost else _EXPLAIN_SECS)
        try:
            while (found := found or self._loss(own, self._others)) is None and time.monotonic() < deadline:
                time.sleep(0.1)
        except ConnectionError as service:
            return service
        killed = ConnectionError(worker_waits.never(own, dict.fromkeys(lost, worker_waits.LOST))) if lost else None
        return found or killed

    def _lost_peer(self, text: str) -> list[str]:
        """Returns the task whose connection is lost by an error of TensorFlow's; [] for none that is known."""
        if not _LOST.search(text):
            return []
        if len(self._others) == 1:
            # Another connection may be meant, such as of the user's input.
            other = str(self._others[0])
            address = self._addresses.get(other)
            return [] if address and _sockets.connection_error(address, _EXPLAIN_SECS) is None else [other]
        named, known = [f"{job}:{index}" for job, index in _REMOTE.findall(text)], {*map(str, self._others)}
        return [task for task in reversed(named) if task in known][:1]

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
        wait = wait or self.current_wait()
        if wait is not None:
            # Operations that call Python do it in a thread of their own.
            call, secs = wait.status.call or self.call(threading.main_thread()), time.monotonic() - wait.since
            return dataclasses.replace(wait.status, call=call, blocked_secs=secs), wait.awaited
        own = WorkerStatus(str(self.task))
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
        return dataclasses.replace(own, call=self.call(threading.main_thread()) or what, part=part), self._others

    def note_traced(self, graph: Any) -> None:
        """Notes that a function that the main thread calls has collectives; called while its graph is traced."""
        main = threading.main_thread()
        line = stalls.runtime_call(None if threading.current_thread() is main else stalls.of(main)).line
        if line and graph is not None and (line not in self._functions or self._functions[line].graph() is not graph):
            self._functions[line] = context.CollectiveFunction(graph)

    def waited_for(self) -> str:
        """Returns the names of the other workers that don't wait themselves."""
        names = [str(task) for task in self._others]
        waiting = {task for task in names if (state := self.read(task)) and state.blocked_secs}
        return ", ".join(name for name in names if name not in waiting) or ", ".join(names)

    def lost(self) -> dict[str, str]:
        """Returns how other workers have failed, by name, as far as the service knows.

        Raises:
          ConnectionError: the service does not answer.
        """
        try:
            jobs = collections.Counter(task.type for task in self.tasks)
            states = context.errors_of_tasks(jobs) if self.service_answers() else {}
        except tf.errors.OpError as error:
            raise self._service_lost(error) from None
        return {
            task: worker_waits.LOST if _SILENT in text else text
            for task, text in states.items()
            if task != str(self.task)
        }

    def service_answers(self) -> bool:
        """Returns False if the service does not answer now; raises ConnectionError if it has not for long.

        The request for the others' states has no time limit, and blocks Python meanwhile. So this one, which has, comes
        before it. All know its answer: the chief's first broadcast, which stays.
        """
        now = time.monotonic()
        if self._ask(f"tfdist/1/{SEEDING}", _ASK_MS) is not None:
            self._silent_since = None
            return True
        self._silent_since = self._silent_since or now
        if now - self._silent_since < keepalive.LOST_SECS:
            return False
        silence = f"has not answered for {keepalive.LOST_SECS:g} s"
        raise self._chief_lost(f"it has the coordination service, and {silence}")

    # The thread that looks.

    def _run(self) -> None:
        every = max(_LOOK_EVERY_SECS, len(self._others) / _WORKERS_PER_LOOK)
        while not self._stopped.wait(every):
            # A look that fails says nothing about the others; the next one may. Nothing else ends a wait.
            with contextlib.suppress(Exception):
                self._look()
            with contextlib.suppress(Exception):
                self.on_look()

    def _look(self) -> None:
        """Publishes this worker's status while it waits, and fails its wait if that can't end."""
        frame, wait = self._blocked_frame(), self.current_wait()
        own, awaited = self.state(frame, wait)
        in_collective = not own.blocked_secs and bool(awaited)
        if in_collective:
            own = dataclasses.replace(own, blocked_secs=time.monotonic() - self._blocked_since - self._idle_secs)
        try:
            with self._lock:
                status, is_waiting = self._all_waits.look(own, time.monotonic())
                if status is not None and not self.ended and (not is_waiting or self.service_answers()):
                    self.post(f"state/{self.task}", status.to_json())
            error = self._loss(own, awaited) if is_waiting else None
        except ConnectionError as loss:
            error = loss
        if error is None:
            return
        if not in_collective and wait is not None:
            # Of this wait only: if it has ended meanwhile, the reason must not end another one.
            wait.failure = wait.failure or error
        elif in_collective and self.failure is None:
            self.failure = error
            with contextlib.suppress(tf.errors.OpError):
                context.abort_collectives(str(error))

    def _loss(self, own: WorkerStatus, awaited: Sequence[Task]) -> Exception | None:
        """Returns why a wait for these tasks can't end: they have ended or failed, or all wait; None if it may.

        Raises:
          ConnectionError: the service does not answer.
        """
        names = [str(task) for task in awaited]
        with self._lock:
            for task in self._others:
                if (status := self.read(str(task))) is not None:
                    self._all_waits.hear(status)
            reason = self._all_waits.reason(own, names)
        if not reason:
            lost = {task: text for task, text in self.lost().items() if task in names}
            # The service knows of a task that has ended only once its heartbeats have been missing for 10 s.
            addresses = {name: self._addresses[name] for name in names if name in self._addresses}
            lost = lost or dict.fromkeys(lost_servers.refused(addresses), worker_waits.LOST)
            reason = worker_waits.never(own, lost) if lost else None
        return self._failed(reason) if reason else None

    def _failed(self, reason: str) -> Exception:
        self._all_waits.failed(time.monotonic())
        return RuntimeError(reason) if worker_waits.PARTED.match(reason) else ConnectionError(reason)

    def read(self, task: str) -> WorkerStatus | None:
        """Returns the last status that a worker has published; None if there is none."""
        text = self.peek(f"state/{task}")
        return None if text is None else WorkerStatus.from_json(text)

    def _blocked_frame(self) -> FrameType | None:
        """Returns the main thread's frame if it has been blocked in TensorFlow and the process idle for a while."""
        is_idle, call, now = self._idleness.check(), self.blocked(), time.monotonic()
        if call is None or call[1] != self._blocked_token or not is_idle:
            self._blocked_token, self._blocked_since = call[1] if call else -1, now
        is_long = call is not None and now - self._blocked_since >= worker_waits.LOOK_AFTER_SECS
        return self.blocked.frame if is_long else None

    # The end of the program.

    def end(self, how: str = worker_waits.HAS_ENDED) -> None:
        """Tells the other workers that this one makes no more calls; done at the end of the program."""
        # A forked copy of the program is no worker.
        if self.ended or os.getpid() != self._process:
            return
        with self._lock, contextlib.suppress(ConnectionError):
            # Nothing is published after it. Storing has no time limit.
            self.ended = how
            if self.service_answers():
                self.post(f"state/{self.task}", WorkerStatus(str(self.task), ended=how).to_json())

    def close(self) -> None:
        """Ends the threads, after which this worker makes no more calls; may be called again."""
        self.end()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECS)
        self.reporter.stop()
        self.blocked.forget()
