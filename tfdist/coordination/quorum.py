# SPDX-License-Identifier: Apache-2.0
"""Quorum: workers report their contributions to a server, and receive the contributors of each update.

    worker's Keras thread     worker's second thread        server (in the chief's process)
                                STARTED step 7  --------->  policy.started
                                ARRIVED step 7  --------->  policy.arrived: is the update due?
      <---------------------------------------------------  UPDATE 7 from workers 0, 2 and 5, to all workers

The server carries control traffic only, short lines. It owns the policy, which one thread runs. So the
reports have one order, and all workers receive the same verdicts in the same order.

The server, a `lines.LineServer`, listens on all interfaces, as TensorFlow's do. A client must prove that it knows
the job's secret. Other connections are closed with a line in the log. Messages after the introduction are neither
encrypted nor signed, and neither are the gradients: the network between the workers must be trusted.

No TensorFlow import.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfdist import _log, _sockets
from tfdist.coordination import keepalive, lines
from tfdist.coordination.lines import ProtocolError
from tfdist.policies.base import Aggregation, Update

_PROTOCOL = "quorum-4"
STATUS_EVERY_SECS = 2.0
# A server without a message for so long is lost. Workers that are lost are seen by the coordination service.
SILENCE_SECS = 30.0
# Most log lines about refused connections between two statuses, so that a flood doesn't fill the disk.
_MOST_LINES = 10
# The chief's worker is an update or two behind the server.
_KEPT_UPDATES = 16
_CONNECT_SECS = 30.0
_RETRY_SECS = 0.1
_JOIN_SECS = 10.0

# Messages: lines of JSON.


class Act(enum.IntEnum):
    """State that a worker reports."""

    WANTED = 1  # Keras asks for the update of this step, while the worker computes for an earlier one
    STARTED = 2  # Keras asks for the update, and the worker starts to compute a contribution: implies WANTED
    ARRIVED = 3  # the worker has computed its contribution
    ENDED = 4  # the worker's data have ended


class Kind(enum.IntEnum):
    """Kind of a verdict from the quorum server."""

    STATUS = 0  # workers: the `Doing` of each; `count` is the number of missing contributions
    UPDATE = 1  # make the update of this step; workers: its contributors; `count` is the number of its examples
    END = 2  # this pass over the data is over; `count` is its number
    LOST = 3  # workers: those that are lost


class Doing(enum.IntEnum):
    """State of a worker, as last reported to the quorum server."""

    ELSEWHERE = 0
    LATE = 1
    COMPUTING = 2
    ARRIVED = 3


_DOING = {
    Doing.ELSEWHERE: " (has not come to this step yet)",
    Doing.LATE: " (still busy with an earlier step)",
    Doing.COMPUTING: "",
}


class WorkerReport(NamedTuple):
    """A line from a worker to the quorum server.

    Attributes:
      act: state of the worker.
      number: number of the pass over the data, from 1.
      step: the global step.
      examples: number of examples in the contribution.
      secs: time that the computation of the contribution took, on the worker's clock.
      input_secs: the part of it in which the worker waited for its batch.
    """

    act: Act
    number: int
    step: int
    examples: int = 0
    secs: float = 0.0
    input_secs: float = 0.0


class Verdict(NamedTuple):
    """A line from the quorum server to a worker.

    Attributes:
      kind: kind of the verdict.
      step: the global step.
      workers: see `Kind`.
      count: see `Kind`.
      dropped: the workers whose gradients were dropped since the previous update, once per dropped gradient.
      wait_secs: for an update, see `tfdist.policies.Update`.
      spread_secs: for an update, see `tfdist.policies.Update`.
    """

    kind: Kind
    step: int
    workers: tuple[int, ...] = ()
    count: int = 0
    dropped: tuple[int, ...] = ()
    wait_secs: float = 0.0
    spread_secs: float = 0.0


def pack(message: WorkerReport | Verdict) -> bytes:
    """Returns the line of a message."""
    return json.dumps(message).encode() + b"\n"


def unpack(kind: Any, line: bytes) -> Any:
    """Returns the message of a line.

    Raises:
      ProtocolError: it is none of this kind.
    """
    try:
        message = kind(*(tuple(each) if isinstance(each, list) else each for each in json.loads(line)))
        if isinstance(message, WorkerReport):
            act, *counts, secs, input_secs = message
            is_known = all(type(each) is int and each >= 0 for each in counts)
            if not is_known or not all(0 <= each < math.inf for each in (secs, input_secs)):
                raise ValueError(line)
            message = message._replace(act=Act(act))
        return message
    except (ValueError, TypeError, RecursionError):
        raise ProtocolError(f"sent no {kind.__name__}") from None


class QuorumServer:
    """Quorum server of one job, from `start` to `close`.

    Args:
      policy: decides which contributions form an update; `begin` was called. Used by this server alone.
      names: the workers' names, such as "worker:0".
      secret: shared secret of the job.
      clock: returns seconds, monotonic.
      say: writes a line to the log; standard error by default.

    Raises:
      OSError: there is no free port.
    """

    def __init__(
        self,
        policy: Aggregation,
        names: Sequence[str],
        secret: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.say,
    ) -> None:
        self._policy = policy
        self._names = tuple(names)
        self._secret = secret
        self._clock = clock
        self._say = say
        self._listener = _sockets.listen(0)
        self._server = lines.LineServer(self._listener, self._converse, self._left, self._tick, STATUS_EVERY_SECS)
        self._clients: dict[lines.Peer, int] = {}
        self._num_refused = 0
        self._lost: set[int] = set()
        # By worker: the step that Keras requested last, the step that it computes, and the number of examples in an
        # accepted contribution.
        self._wanted: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._examples: dict[int, int] = {}
        self._opened_step = -1
        self._ended = set[int]()
        # The newest updates, for the chief's records.
        self._updates: collections.deque[Update] = collections.deque(maxlen=_KEPT_UPDATES)
        # Called with an error of the policy, which ends the server; the chief raises it.
        self.on_error: Callable[[Exception], object] = lambda error: say(f"the quorum server has ended: {error!r}")

    @property
    def port(self) -> int:
        """Port at which the server listens."""
        return self._listener.getsockname()[1]

    def start(self) -> None:
        """Starts the server's thread."""
        self._server.__enter__()

    def update_of(self, step: int) -> Update | None:
        """Returns the policy's `Update` that made global step `step`, if it is one of the last ones; in any thread."""
        return next((update for update in list(self._updates) if update.step == step), None)

    def close(self) -> None:
        """Stops the thread and closes all connections. May be called again."""
        self._server.close()

    # Connections.

    def _converse(self, peer: lines.Peer) -> lines.Conversation:
        name, answer = yield from lines.identify(self._secret, _PROTOCOL, self._names[0])
        worker = self._names.index(name) if name in self._names else -1
        if worker < 0 or worker in self._clients.values() or worker in self._lost:
            raise ProtocolError(f"says that it is {name}, which was here before, or is no worker of this job")
        peer.stay()
        self._clients[peer] = worker
        peer.send(answer)
        if self._lost:
            peer.send(pack(self._losses()))
        try:
            while True:
                self._handle(worker, unpack(WorkerReport, (yield b"")))
        except ProtocolError:
            raise
        except Exception as error:
            # Of the policy. The worker is not lost, and must not be blamed.
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.on_error(error)
        self._server.close()

    def _left(self, peer: lines.Peer) -> None:
        worker = self._clients.pop(peer, None)
        if self._server.is_closing:
            return
        if worker is not None:
            self._lost.add(worker)
            # Workers leave one after the other at the end of the program. One that waits for an update raises an error.
            if not peer.has_left:
                self._say(f"the quorum server closed the connection of {self._names[worker]}, which {peer.reason}")
            self._broadcast(self._losses())
            return
        self._num_refused += 1
        if self._num_refused <= _MOST_LINES:
            self._say(f"the quorum server closed a connection from {peer.name}, which {peer.reason}")

    def _tick(self) -> None:
        if self._num_refused > _MOST_LINES:
            self._say(f"the quorum server closed {self._num_refused - _MOST_LINES} more connections of strangers")
        self._num_refused = 0
        try:
            missing = max(0, self._policy.replicas_to_aggregate - len(self._policy.contributors))
        except Exception as error:
            self._fail(error)
        else:
            self._broadcast(self._verdict(Kind.STATUS, tuple(map(self._doing, self._all())), missing))

    def _broadcast(self, verdict: Verdict) -> None:
        line = pack(verdict)
        for peer in list(self._clients):
            peer.send(line)

    def _losses(self) -> Verdict:
        return self._verdict(Kind.LOST, tuple(sorted(self._lost)))

    # Reports of the workers.

    def _handle(self, worker: int, report: WorkerReport) -> None:
        now, step = self._clock(), self._policy.step
        if report.step > step:
            raise ProtocolError(f"speaks of step {report.step}, and the job is at step {step}")
        is_current = report.step == step and report.number not in self._ended
        if report.act in (Act.WANTED, Act.STARTED):
            self._wanted[worker] = report.step
            if is_current and step > self._opened_step:
                self._opened_step = step
                self._policy.opened(now)
        if report.act == Act.WANTED:
            return
        if report.act == Act.STARTED:
            self._started[worker] = report.step
            if is_current:
                self._policy.start(worker, now)
            elif report.step < step:
                # The worker has not received the last verdict yet.
                self._policy.started_late(worker, report.step, now)
        elif report.act == Act.ENDED:
            self._started.pop(worker, None)
            if is_current:
                self._policy.found_no_data(worker)
                self._end(report.number, now)
        elif report.step == step and not is_current:
            # The contribution is from the previous pass, which ended without this step's update: it is dropped.
            self._policy.withdraw(worker, now)
        else:
            self._arrived(worker, report, now)

    def _arrived(self, worker: int, report: WorkerReport, now: float) -> None:
        self._started.pop(worker, None)
        # STARTED and ARRIVED may be read together, if this thread or the network was slow: only the worker knows how
        # long it has computed.
        if self._policy.arrived(worker, report.step, now, report.input_secs, now - report.secs).accepted:
            self._examples[worker] = report.examples
        if not self._policy.update_due:
            return
        examples = sum(self._examples[contributor] for contributor in self._policy.contributors)
        update = self._policy.updated(now)
        # Before any worker knows of it.
        self._updates.append(update)
        self._examples.clear()
        made = update.contributors, examples, update.dropped, update.wait_secs, update.spread_secs
        self._broadcast(Verdict(Kind.UPDATE, update.step - 1, *made))
        for change in update.changes:
            self._say(change.text)

    def _end(self, number: int, now: float) -> None:
        """Ends the pass over the data for all workers, because the data of one worker have ended."""
        self._ended.add(number)
        self._opened_step = -1
        for worker in self._all():
            # Contributions of this pass are dropped. A worker that still computes reports ARRIVED later.
            self._policy.withdraw(worker, now)
        self._broadcast(self._verdict(Kind.END, count=number))

    def _verdict(self, kind: Kind, workers: tuple[int, ...] = (), count: int = 0) -> Verdict:
        return Verdict(kind, self._policy.step, workers, count)

    def _doing(self, worker: int) -> Doing:
        if worker in self._policy.contributors or self._policy.is_spare(worker):
            return Doing.ARRIVED
        if self._wanted.get(worker) != self._policy.step:
            return Doing.ELSEWHERE
        return Doing.LATE if self._started.get(worker, self._policy.step) < self._policy.step else Doing.COMPUTING

    def _all(self) -> range:
        return range(len(self._names))


class QuorumClient:
    """Connection of one worker: sends its reports to the quorum server, and receives the server's verdicts.

    Any thread may send a report; one thread waits for verdicts.

    Args:
      address: host and port of the server.
      worker: this worker's index.
      names: the workers' names; the server runs in the first one's process.
      secret: shared secret of the job.
      stall_timeout_secs: how long to wait for a verdict while no worker makes progress.
      clock: returns seconds, monotonic.

    Raises:
      ConnectionError: no server answers at this address, or it belongs to another job.
    """

    def __init__(
        self,
        address: tuple[str, int],
        worker: int,
        names: Sequence[str],
        secret: bytes,
        *,
        stall_timeout_secs: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._names = tuple(names)
        self._stall_timeout_secs = stall_timeout_secs
        self._clock = clock
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        # Verdicts that `wait` has not returned yet, by step; the last pass over the data that has ended.
        self._updates: dict[int, Verdict] = {}
        self._ended = set[int]()
        self._status: Verdict | None = None
        # Time of the last change in the workers' status.
        self._moved_at = clock()
        self._error: str | Exception | None = None
        # Names of the workers that the server has lost.
        self.lost: list[str] = []
        self._server = f"the quorum server of {self._names[0]} at {address[0]}:{address[1]}"
        self._connection = self._connect(address, secret)
        self._thread = threading.Thread(target=self._listen, name="tfdist quorum client", daemon=True)
        self._thread.start()

    def report(self, act: Act, number: int, step: int, *facts: Any) -> None:
        """Reports the state of this worker; see `WorkerReport`. Any thread may call it."""
        try:
            with self._sending:
                self._connection.socket.sendall(pack(WorkerReport(act, number, step, *facts)))
        except OSError as error:
            self.fail(f"{self._server} is gone: {error.strerror or error}")

    def is_decided(self, number: int, step: int) -> bool:
        """Returns True if the step's update was decided, or the pass has ended, so that a contribution is too late."""
        with self._changed:
            return step in self._updates or number in self._ended

    def wait(self, number: int, step: int, check: Callable[[], None] = lambda: None) -> Verdict | None:
        """Waits for the verdict on `step`.

        Args:
          number: number of the pass over the data.
          step: the global step.
          check: called twice a second and after `wake`; may raise.

        Returns:
          The update's verdict, or None if the pass is over.

        Raises:
          Exception: that of `fail`.
          ConnectionError: the server or another worker is lost.
          TimeoutError: no worker made progress for `stall_timeout_secs`. The message names the late workers.
        """
        began = self._clock()
        while True:
            check()
            with self._changed:
                # An update that was decided before a worker was lost is made, by all surviving workers.
                if step in self._updates:
                    return self._updates.pop(step)
                if number in self._ended:
                    return None
                if isinstance(self._error, Exception):
                    # Once: its traceback keeps the data of the call alive.
                    error, self._error = self._error, "the policy has failed"
                    raise error
                if self._error is not None:
                    raise ConnectionError(f"{self._error}; the update of step {step} can't be made")
                if self._clock() - max(began, self._moved_at) >= self._stall_timeout_secs:
                    raise TimeoutError(
                        f"the update of step {step} waits for {self.waited_for()}, and nothing new was heard of them "
                        f"for stall_timeout_secs={self._stall_timeout_secs:g}. Start all workers again, or give a slow "
                        "step more time."
                    )
                self._changed.wait(keepalive.POLL_SECS)

    def wake(self) -> None:
        """Wakes `wait`, which then calls its `check`."""
        with self._changed:
            self._changed.notify_all()

    def waited_for(self) -> str:
        """Returns the names of the workers that hold up the update, from the server's last status."""
        with self._changed:
            status = self._status
        if status is None:
            return self._server
        absent = [
            name + _DOING[Doing(doing)]
            for name, doing in zip(self._names, status.workers, strict=True)
            if doing != Doing.ARRIVED
        ]
        return f"{status.count} of " + ", ".join(absent) if absent else self._server

    def close(self) -> None:
        """Closes the connection; may be called again."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
        self._connection.socket.close()

    # The connection.

    def _connect(self, address: tuple[str, int], secret: bytes) -> lines.Connection:
        until = time.monotonic() + _CONNECT_SECS
        while True:
            try:
                connection = lines.Connection(address, SILENCE_SECS)
            except OSError as error:
                raise ConnectionError(f"{self._server} can't be reached: {error.strerror or error}") from error
            try:
                connection.introduce(secret, _PROTOCOL, self._names[self._worker], self._names[0])
                return connection
            except ProtocolError as error:
                problem = str(error)
            except (EOFError, ConnectionError) as error:
                # The server drops unknown connections when there are too many. A refusal has an answer of its own.
                problem = str(error) if time.monotonic() > until else ""
            except OSError as error:
                problem = f"does not answer: {error.strerror or error}"
            connection.socket.close()
            if problem:
                raise ConnectionError(f"{self._server} {problem}")
            self._closing.wait(_RETRY_SECS)

    def _listen(self) -> None:
        try:
            while line := self._connection.read_line():
                self._hear(unpack(Verdict, line))
            self.fail(f"{self._server} is gone: it closed the connection")
        except TimeoutError:
            self.fail(f"{self._server} has been silent for {SILENCE_SECS:g} s")
        except (OSError, ProtocolError) as error:
            self.fail(f"{self._server} is gone: {error}")

    def _hear(self, verdict: Verdict) -> None:
        with self._changed:
            if verdict.kind == Kind.STATUS:
                if verdict != self._status:
                    self._status, self._moved_at = verdict, self._clock()
                return
            if verdict.kind == Kind.UPDATE:
                self._updates[verdict.step] = verdict
            elif verdict.kind == Kind.END:
                self._ended.add(verdict.count)
            else:
                self.lost = [self._names[worker] for worker in verdict.workers]
                self._error = self._error or f"{', '.join(self.lost)} has ended, or can't be reached any more"
            self._changed.notify_all()

    def fail(self, error: str | Exception) -> None:
        """Ends all waits with this error; a text is of the connection."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
