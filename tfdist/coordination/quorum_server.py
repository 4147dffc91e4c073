# SPDX-License-Identifier: Apache-2.0
"""Quorum server: workers report their contributions, and receive the contributors of each update.

    worker's Keras thread     worker's second thread        server (in the chief's process)
                                STARTED step 7  --------->  policy.started
                                ARRIVED step 7  --------->  policy.arrived: is the update due?
      <---------------------------------------------------  UPDATE 7 from workers 0, 2 and 5, to all workers

The server carries control traffic only, some forty bytes per message. It owns the policy, which one thread runs. So the
reports have one order, and all workers receive the same verdicts in the same order.

The server listens at the chief's own address only. A client must prove that it knows the job's secret (see
`quorum_server`). Other connections are closed with a line in the log. They can't block a worker: the server waits for
no unidentified connection, and closes the oldest ones when there are too many. Messages after the handshake are neither
encrypted nor signed, and neither are the gradients: the network between the workers must be trusted.

No TensorFlow import.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import hashlib
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tfdist import _forks, _log, _sockets
from tfdist.policies.base import Aggregation, Update

# Wire format between a worker and the quorum server. Pure functions: no sockets, no TensorFlow.
#
# A connection begins with a handshake, in which both sides prove that they know the job's secret; the secret itself is
# never sent. Then each side sends frames of one size:
#
#     server -> worker   greeting   magic, nonce
#     worker -> server   claim      magic, index of the worker, nonce, proof
#     server -> worker   proof, or a refusal
#     worker -> server   reports    state of this worker
#     server -> worker   verdicts   contributors of an update, or the status of all workers
#
# A proof is the HMAC-SHA256 (RFC 2104) of both nonces, the role of the sender and the worker's index. Any other message
# raises `ProtocolError`, and the receiver closes the connection.


MAGIC = b"tfdist quorum 2\r\n"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_CLAIM = struct.Struct(f"!{len(MAGIC)}sI{NONCE_BYTES}s{PROOF_BYTES}s")
_REPORT = struct.Struct("!BIQQd")
_VERDICT = struct.Struct("!BQQdd")

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
CLAIM_BYTES = _CLAIM.size
# Sent in place of a proof; equals a proof with a probability of 2 to the -256.
REFUSAL = b"refused".ljust(PROOF_BYTES, b"\0")
REPORT_BYTES = _REPORT.size

# `Verdict.marks` of an update has this bit for a contributor; the other bits count the worker's dropped gradients.
CONTRIBUTED = 0x80
_MOST_DROPPED = 0x7F


class ProtocolError(Exception):
    """The other side sent an invalid message. The text follows the sender's name in a sentence."""


class Act(enum.IntEnum):
    """State that a worker reports."""

    ALIVE = 0
    WANTED = 1  # Keras asks for the update of this step, while the worker computes for an earlier one
    STARTED = 2  # Keras asks for the update, and the worker starts to compute a contribution
    ARRIVED = 3  # the worker has computed its contribution
    ENDED = 4  # the worker's data have ended


class Kind(enum.IntEnum):
    """Kind of a verdict from the quorum server."""

    STATUS = 0  # marks: a `Doing` for each worker; `count` is the number of missing contributions
    UPDATE = 1  # make the update of this step; `count` is the number of its examples
    END = 2  # this pass over the data is over; `count` is its number
    LOST = 3  # the workers with a nonzero mark are lost


class Doing(enum.IntEnum):
    """State of a worker, as last reported to the quorum server."""

    ELSEWHERE = 0
    LATE = 1
    COMPUTING = 2
    ARRIVED = 3


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """A frame from a worker to the quorum server.

    Attributes:
      act: state of the worker.
      number: number of the pass over the data, from 1.
      step: the global step.
      examples: number of examples in the contribution.
      secs: time that the computation of the contribution took, on the worker's clock.
    """

    act: Act
    number: int = 0
    step: int = 0
    examples: int = 0
    secs: float = 0.0

    def pack(self) -> bytes:
        """Returns the frame, of `REPORT_BYTES` bytes."""
        return _REPORT.pack(self.act, self.number, self.step, self.examples, self.secs)

    @classmethod
    def unpack(cls, frame: bytes) -> WorkerReport:
        """Parses a frame.

        Raises:
          ProtocolError: the frame is of an unknown kind.
        """
        act, number, step, examples, secs = _REPORT.unpack(frame)
        if act >= len(Act):
            raise ProtocolError(f"sent a report of no known kind, {act}")
        if not 0.0 <= secs < math.inf:
            raise ProtocolError(f"sent a report of a contribution that took {secs} s")
        return cls(Act(act), number, step, examples, secs)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A frame from the quorum server to a worker.

    Attributes:
      kind: kind of the verdict.
      step: the global step.
      count: see `Kind`.
      wait_secs: for an update, see `tfdist.policies.Update`.
      spread_secs: for an update, see `tfdist.policies.Update`.
      marks: one byte for each worker; see `Kind`, `Doing` and `CONTRIBUTED`.
    """

    kind: Kind
    step: int
    marks: bytes
    count: int = 0
    wait_secs: float = 0.0
    spread_secs: float = 0.0

    def pack(self) -> bytes:
        """Returns the frame, of `verdict_bytes` bytes."""
        return _VERDICT.pack(self.kind, self.step, self.count, self.wait_secs, self.spread_secs) + self.marks

    @classmethod
    def unpack(cls, frame: bytes) -> Verdict:
        """Parses a frame.

        Raises:
          ProtocolError: the frame is of an unknown kind.
        """
        kind, step, count, wait_secs, spread_secs = _VERDICT.unpack_from(frame)
        if kind >= len(Kind):
            raise ProtocolError(f"sent a verdict of no known kind, {kind}")
        return cls(Kind(kind), step, frame[_VERDICT.size :], count, wait_secs, spread_secs)

    def contributors(self) -> tuple[int, ...]:
        """Returns the workers whose gradients form the update."""
        return tuple(worker for worker, mark in enumerate(self.marks) if mark & CONTRIBUTED)

    def dropped(self) -> tuple[int, ...]:
        """Returns the workers whose gradients were dropped since the previous update, once per dropped gradient."""
        return tuple(worker for worker, mark in enumerate(self.marks) for _ in range(mark & _MOST_DROPPED))


def verdict_bytes(num_workers: int) -> int:
    """Returns the size of a verdict in a job of so many workers."""
    return _VERDICT.size + num_workers


def update_marks(num_workers: int, contributors: tuple[int, ...], dropped: tuple[int, ...]) -> bytes:
    """Encodes the contributors and the dropped gradients of an update as `Verdict.marks`."""
    marks = bytearray(num_workers)
    for worker in dropped:
        marks[worker] = min(marks[worker] + 1, _MOST_DROPPED)
    for worker in contributors:
        marks[worker] |= CONTRIBUTED
    return bytes(marks)


class Frames:
    """Cuts a stream of bytes into pieces of known sizes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Appends received bytes."""
        self._buffer += data

    def take(self, size: int) -> bytes | None:
        """Removes and returns the next `size` bytes, or returns None if fewer were received."""
        if len(self._buffer) < size:
            return None
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def take_all(self, size: int) -> Iterator[bytes]:
        """Yields all complete pieces of `size` bytes."""
        while (piece := self.take(size)) is not None:
            yield piece


def greeting(nonce: bytes) -> bytes:
    """Returns the server's first message of the handshake."""
    return MAGIC + nonce


def read_greeting(data: bytes) -> bytes:
    """Returns the nonce of a greeting.

    Raises:
      ProtocolError: the data are no greeting.
    """
    if not data.startswith(MAGIC):
        raise ProtocolError("does not speak this protocol")
    return data[len(MAGIC) :]


def claim(secret: bytes, worker: int, server_nonce: bytes, nonce: bytes) -> bytes:
    """Returns the message with which a worker identifies itself."""
    return _CLAIM.pack(MAGIC, worker, nonce, _sockets.proof(secret, *_words("worker", worker, server_nonce, nonce)))


def read_claim(data: bytes, secret: bytes, num_workers: int, server_nonce: bytes) -> tuple[int, bytes]:
    """Checks a claim.

    Returns:
      The worker's index, and the server's answer.

    Raises:
      ProtocolError: the data are no claim, or the sender doesn't know the secret.
    """
    magic, worker, nonce, proof = _CLAIM.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("does not speak this protocol")
    if not _sockets.is_proof(proof, secret, *_words("worker", worker, server_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")
    if worker >= num_workers:
        raise ProtocolError(f"says that it is worker {worker} of {num_workers}")
    return worker, _sockets.proof(secret, *_words("server", worker, server_nonce, nonce))


def check_answer(answer: bytes, secret: bytes, worker: int, server_nonce: bytes, nonce: bytes) -> None:
    """Checks that an answer to a claim is from the quorum server of this job.

    Raises:
      ProtocolError: the sender doesn't know the secret.
    """
    if not _sockets.is_proof(answer, secret, *_words("server", worker, server_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")


def _words(role: str, worker: int, server_nonce: bytes, nonce: bytes) -> tuple[str | int, ...]:
    return "quorum", role, worker, server_nonce.hex(), nonce.hex()


STATUS_EVERY_SECS = 2.0
# A worker without a message for so long is lost.
SILENCE_SECS = 30.0
_HANDSHAKE_SECS = 10.0
_RECEIVE_BYTES = 4096
# Most log lines about refused connections between two statuses, so that a flood doesn't fill the disk.
_MOST_LINES = 10
_NO_RESOURCES_SECS = 0.01
_JOIN_SECS = 10.0
# The chief's worker is an update or two behind the server.
_KEPT_UPDATES = 16


@dataclasses.dataclass(eq=False)
class _Connection:
    """One connection; `worker` is None until the handshake is complete."""

    socket: socket.socket
    peer: str
    nonce: bytes
    since: float
    heard: float
    frames: Frames = dataclasses.field(default_factory=Frames)
    worker: int | None = None
    is_open: bool = True


class QuorumServer:
    """Quorum server of one job, from `start` to `close`.

    Args:
      policy: decides which contributions form an update; `begin` was called. Used by this server alone.
      names: the workers' names, such as "worker:0".
      secret: shared secret of the job.
      host: the chief's own name or address; the port is any free one.
      clock: returns seconds, monotonic.
      say: writes a line to the log; standard error by default.

    Raises:
      OSError: `host` is no address of this machine.
    """

    def __init__(
        self,
        policy: Aggregation,
        names: Sequence[str],
        secret: bytes,
        host: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = _log.say,
    ) -> None:
        self._policy = policy
        self._names = tuple(names)
        self._secret = secret
        self._clock = clock
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._listener = _forks.keep(_listen(host))
        self._wake, self._woken = socket.socketpair()
        self._clients: dict[int, _Connection] = {}
        # Oldest first.
        self._strangers: dict[_Connection, None] = {}
        self._num_refused = 0
        self._lost: set[int] = set()
        # By worker: the step that Keras requested last, the step that it computes, and the number of examples in an
        # accepted contribution.
        self._wanted: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._examples: dict[int, int] = {}
        self._opened_step = -1
        self._ended_pass = 0
        # The newest updates, for the chief's records.
        self._updates: collections.deque[Update] = collections.deque(maxlen=_KEPT_UPDATES)
        self._thread = threading.Thread(target=self._run, name="tfdist quorum server", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which the server listens."""
        return self._listener.getsockname()[:2]

    def start(self) -> None:
        """Starts the server's thread."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()

    def update_of(self, step: int) -> Update | None:
        """Returns the policy's `Update` that made global step `step`, if it is one of the last ones; in any thread."""
        return next((update for update in list(self._updates) if update.step == step), None)

    def close(self) -> None:
        """Stops the thread and closes all connections. May be called again."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECS)
        for each in (self._wake, self._woken, self._listener):
            each.close()

    def _run(self) -> None:
        tick = self._clock()
        try:
            while True:
                for key, _ in self._selector.select(max(0.0, tick - self._clock())):
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data.is_open:
                        self._receive(key.data)
                if self._clock() >= tick:
                    tick = self._clock() + STATUS_EVERY_SECS
                    self._tick()
        finally:
            for connection in (*self._strangers, *self._clients.values()):
                connection.socket.close()
            self._selector.close()

    # Connections.

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
            _forks.keep(accepted)
        except OSError as error:
            # Any other error: the peer closed the connection before it was accepted.
            if error.errno in _sockets.NO_RESOURCES:
                self._make_room("stayed silent while no more could be opened")
                time.sleep(_NO_RESOURCES_SECS)
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = self._clock()
        connection = _Connection(accepted, f"{peer[0]}:{peer[1]}", secrets.token_bytes(NONCE_BYTES), now, now)
        if len(self._strangers) >= _sockets.MOST_STRANGERS:
            self._make_room(f"was one of more than {_sockets.MOST_STRANGERS} that had not introduced themselves")
        self._strangers[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._send(connection, greeting(connection.nonce))

    def _make_room(self, reason: str) -> None:
        if self._strangers:
            hosts = [stranger.peer.rpartition(":")[0] for stranger in self._strangers]
            self._drop(_sockets.to_give_way(self._strangers, hosts), f"it {reason}")

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, f"its connection to the quorum server broke ({error.strerror or error})")
            return
        if not data:
            self._drop(connection, "its connection to the quorum server was closed")
            return
        connection.heard = self._clock()
        connection.frames.feed(data)
        try:
            if connection.worker is None and not self._introduce(connection):
                return
            for frame in connection.frames.take_all(REPORT_BYTES):
                self._handle(connection.worker or 0, WorkerReport.unpack(frame))
        except (ProtocolError, ValueError) as error:
            if connection.worker is None:
                # A worker with another secret then fails at once instead of trying again.
                self._send(connection, REFUSAL)
            self._drop(connection, f"it {error}")

    def _introduce(self, connection: _Connection) -> bool:
        """Reads the worker's claim; returns False if it is incomplete, or if the connection was closed."""
        claim = connection.frames.take(CLAIM_BYTES)
        if claim is None:
            return False
        worker, answer = read_claim(claim, self._secret, len(self._names), connection.nonce)
        if worker in self._clients or worker in self._lost:
            raise ProtocolError(f"says that it is {self._names[worker]}, which was here before")
        del self._strangers[connection]
        connection.worker = worker
        self._clients[worker] = connection
        self._send(connection, answer)
        if self._lost:
            self._send(connection, self._losses().pack())
        return connection.is_open

    def _send(self, connection: _Connection, data: bytes) -> None:
        # Frames are small: the socket's buffer is full only if the peer has read nothing for minutes.
        try:
            sent = connection.socket.send(data)
        except OSError as error:
            self._drop(connection, f"its connection to the quorum server broke ({error.strerror or error})")
            return
        if sent < len(data):
            self._drop(connection, "it does not read what the quorum server sends")

    def _drop(self, connection: _Connection, reason: str) -> None:
        if not connection.is_open:
            return
        connection.is_open = False
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection in self._strangers:
            del self._strangers[connection]
            self._refused(connection, reason.removeprefix("it "))
        if connection.worker is not None:
            del self._clients[connection.worker]
            self._lost.add(connection.worker)
            # Not logged, because workers leave one after the other at the end of the program. A worker that waits for
            # an update raises an error.
            self._broadcast(self._losses())

    def _refused(self, connection: _Connection, reason: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MOST_LINES:
            self._say(f"the quorum server closed a connection from {connection.peer}, which {reason}")

    def _tick(self) -> None:
        now = self._clock()
        if self._num_refused > _MOST_LINES:
            self._say(f"the quorum server closed {self._num_refused - _MOST_LINES} more connections of strangers")
        self._num_refused = 0
        for connection in list(self._strangers):
            if now - connection.since > _HANDSHAKE_SECS:
                self._drop(connection, f"it did not introduce itself within {_HANDSHAKE_SECS:.0f} s")
        for connection in list(self._clients.values()):
            if now - connection.heard > SILENCE_SECS:
                self._drop(connection, f"it has been silent for {SILENCE_SECS:.0f} s")
        missing = max(0, self._policy.replicas_to_aggregate - len(self._policy.contributors))
        self._broadcast(self._verdict(Kind.STATUS, bytes(map(self._doing, self._all())), count=missing))

    def _broadcast(self, verdict: Verdict) -> None:
        frame = verdict.pack()
        for connection in list(self._clients.values()):
            self._send(connection, frame)

    def _losses(self) -> Verdict:
        return self._verdict(Kind.LOST, bytes(worker in self._lost for worker in self._all()))

    # Reports of the workers.

    def _handle(self, worker: int, report: WorkerReport) -> None:
        now, step = self._clock(), self._policy.step
        if report.act == Act.ALIVE:
            return
        if report.step > step:
            raise ProtocolError(f"speaks of step {report.step}, and the job is at step {step}")
        is_current = report.step == step and report.number > self._ended_pass
        if report.act in (Act.WANTED, Act.STARTED):
            self._wanted[worker] = report.step
            if is_current and step > self._opened_step:
                self._opened_step = step
                self._policy.opened(now)
        if report.act == Act.WANTED:
            return
        if report.act == Act.STARTED:
            self._started[worker] = report.step
            # A worker that has not received the last verdict yet starts for a step that is over; that is ignored.
            if is_current:
                self._policy.start(worker, now)
        elif report.act == Act.ENDED:
            self._started.pop(worker, None)
            if is_current:
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
        self._policy.correct_start(worker, report.step, now - report.secs)
        if self._policy.arrived(worker, report.step, now).accepted:
            self._examples[worker] = report.examples
        if not self._policy.update_due:
            return
        examples = sum(self._examples[contributor] for contributor in self._policy.contributors)
        update = self._policy.updated(now)
        # Before any worker knows of it.
        self._updates.append(update)
        self._examples.clear()
        marks = update_marks(len(self._names), update.contributors, update.dropped)
        self._broadcast(Verdict(Kind.UPDATE, update.step - 1, marks, examples, update.wait_secs, update.spread_secs))
        for change in update.changes:
            self._say(change.text)

    def _end(self, number: int, now: float) -> None:
        """Ends the pass over the data for all workers, because the data of one worker have ended."""
        self._ended_pass = number
        self._opened_step = -1
        for worker in self._all():
            # Contributions of this pass are dropped. A worker that still computes reports ARRIVED later.
            self._policy.withdraw(worker, now)
        self._broadcast(self._verdict(Kind.END, bytes(len(self._names)), count=number))

    def _verdict(self, kind: Kind, marks: bytes, count: int = 0) -> Verdict:
        return Verdict(kind, self._policy.step, marks, count)

    def _doing(self, worker: int) -> Doing:
        if worker in self._policy.contributors:
            return Doing.ARRIVED
        if self._wanted.get(worker) != self._policy.step:
            return Doing.ELSEWHERE
        return Doing.LATE if self._started.get(worker, self._policy.step) < self._policy.step else Doing.COMPUTING

    def _all(self) -> range:
        return range(len(self._names))


def _listen(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
