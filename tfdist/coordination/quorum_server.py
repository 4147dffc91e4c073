# SPDX-License-Identifier: Apache-2.0
"""Quorum server: workers report their contributions, and receive the contributors of each update.

    worker's Keras thread     worker's second thread        server (in the chief's process)
                                STARTED step 7  --------->  policy.started
                                ARRIVED step 7  --------->  policy.arrived: is the update due?
      <---------------------------------------------------  UPDATE 7 from workers 0, 2 and 5, to all workers

The server carries control traffic only, short lines. It owns the policy, which one thread runs. So the
reports have one order, and all workers receive the same verdicts in the same order.

The server, a `_sockets.LineServer`, listens on all interfaces, as TensorFlow's do. A client must prove that it knows
the job's secret. Other connections are closed with a line in the log. Messages after the handshake are neither
encrypted nor signed, and neither are the gradients: the network between the workers must be trusted.

No TensorFlow import.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import secrets
import time
from collections.abc import Callable, Sequence

from tfdist import _log, _sockets
from tfdist.policies.base import Aggregation, Update

# Lines between a worker and the quorum server. A connection begins with a handshake, in which both sides prove that
# they know the job's secret; the secret itself is never sent.
#
#     server -> worker   greeting   protocol, nonce
#     worker -> server   claim      protocol, index of the worker, nonce, proof
#     server -> worker   proof, or a refusal
#     worker -> server   reports    state of this worker
#     server -> worker   verdicts   contributors of an update, or the status of all workers
#
# A proof is that of `_sockets.proof`, of both nonces, the role of the sender and the worker's index. Any other message
# raises `ProtocolError`, and the receiver closes the connection.


_PROTOCOL = "tfdist-quorum-3"
REFUSAL = b"refused\n"

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
    number: int = 0
    step: int = 0
    examples: int = 0
    secs: float = 0.0
    input_secs: float = 0.0

    def pack(self) -> bytes:
        """Returns the line."""
        return f"{self.act:d} {self.number} {self.step} {self.examples} {self.secs!r} {self.input_secs!r}\n".encode()

    @classmethod
    def unpack(cls, line: bytes) -> WorkerReport:
        """Parses a line.

        Raises:
          ProtocolError: it is no report.
        """
        try:
            act, *numbers, secs, input_secs = line.decode("ascii").split()
            number, step, examples = map(int, numbers)
            report = cls(Act(int(act)), number, step, examples, float(secs), float(input_secs))
        except ValueError:
            raise ProtocolError("sent no report") from None
        if not 0.0 <= report.input_secs <= report.secs < math.inf or min(number, step, examples) < 0:
            raise ProtocolError("sent a report of impossible numbers")
        return report


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A line from the quorum server to a worker.

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
        """Returns the line."""
        numbers = f"{self.kind:d} {self.step} {self.count} {self.wait_secs!r} {self.spread_secs!r}"
        return f"{numbers} {self.marks.hex() or '-'}\n".encode()

    @classmethod
    def unpack(cls, line: bytes) -> Verdict:
        """Parses a line.

        Raises:
          ProtocolError: it is no verdict.
        """
        try:
            kind, step, count, wait_secs, spread_secs, marks = line.decode("ascii").split()
            of_workers = b"" if marks == "-" else bytes.fromhex(marks)
            return cls(Kind(int(kind)), int(step), of_workers, int(count), float(wait_secs), float(spread_secs))
        except ValueError:
            raise ProtocolError("sent no verdict") from None

    def contributors(self) -> tuple[int, ...]:
        """Returns the workers whose gradients form the update."""
        return tuple(worker for worker, mark in enumerate(self.marks) if mark & CONTRIBUTED)

    def dropped(self) -> tuple[int, ...]:
        """Returns the workers whose gradients were dropped since the previous update, once per dropped gradient."""
        return tuple(worker for worker, mark in enumerate(self.marks) for _ in range(mark & _MOST_DROPPED))


def update_marks(num_workers: int, contributors: tuple[int, ...], dropped: tuple[int, ...]) -> bytes:
    """Encodes the contributors and the dropped gradients of an update as `Verdict.marks`."""
    marks = bytearray(num_workers)
    for worker in dropped:
        marks[worker] = min(marks[worker] + 1, _MOST_DROPPED)
    for worker in contributors:
        marks[worker] |= CONTRIBUTED
    return bytes(marks)


def greeting(nonce: str) -> bytes:
    """Returns the server's first line of the handshake."""
    return f"{_PROTOCOL} {nonce}\n".encode()


def read_greeting(line: bytes) -> str:
    """Returns the nonce of a greeting.

    Raises:
      ProtocolError: the line is no greeting.
    """
    return _words_of(line, 2)[1]


def claim(secret: bytes, worker: int, server_nonce: str, nonce: str) -> bytes:
    """Returns the line with which a worker identifies itself."""
    proof = _sockets.proof(secret, "quorum", "worker", worker, server_nonce, nonce).hex()
    return f"{_PROTOCOL} {worker} {nonce} {proof}\n".encode()


def read_claim(line: bytes, secret: bytes, num_workers: int, server_nonce: str) -> tuple[int, bytes]:
    """Checks a claim.

    Returns:
      The worker's index, and the server's answer.

    Raises:
      ProtocolError: the line is no claim, or the sender doesn't know the secret.
    """
    _, worker, nonce, proof = _words_of(line, 4)
    if not worker.isdecimal() or not _sockets.is_proof(
        proof, secret, "quorum", "worker", int(worker), server_nonce, nonce
    ):
        raise ProtocolError("does not know this job's secret")
    if int(worker) >= num_workers:
        raise ProtocolError(f"says that it is worker {worker} of {num_workers}")
    answer = _sockets.proof(secret, "quorum", "server", int(worker), server_nonce, nonce)
    return int(worker), answer.hex().encode() + b"\n"


def check_answer(line: bytes, secret: bytes, worker: int, server_nonce: str, nonce: str) -> None:
    """Checks that an answer to a claim is from the quorum server of this job.

    Raises:
      ProtocolError: the sender doesn't know the secret.
    """
    proof = line.decode(errors="replace").strip()
    if not _sockets.is_proof(proof, secret, "quorum", "server", worker, server_nonce, nonce):
        raise ProtocolError("does not know this job's secret")


def _words_of(line: bytes, count: int) -> list[str]:
    words = line[: _sockets.LINE_BYTES].decode(errors="replace").split()
    if len(words) != count or words[0] != _PROTOCOL:
        raise ProtocolError("does not speak this protocol")
    return words


STATUS_EVERY_SECS = 2.0
# A worker without a message for so long is lost.
SILENCE_SECS = 30.0
# Most log lines about refused connections between two statuses, so that a flood doesn't fill the disk.
_MOST_LINES = 10
_NONCE_BYTES = 32
# The chief's worker is an update or two behind the server.
_KEPT_UPDATES = 16


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
        self._server = _sockets.LineServer(self._listener, self._converse, clock, self._tick, STATUS_EVERY_SECS)
        # By worker: its connection, and when it was heard last.
        self._clients: dict[int, _sockets.Peer] = {}
        self._heard: dict[int, float] = {}
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

    def _converse(self, peer: _sockets.Peer) -> _sockets.Conversation:
        nonce = secrets.token_hex(_NONCE_BYTES)
        worker = None
        try:
            line = yield greeting(nonce)
            worker, answer = self._introduced(peer, line, nonce)
            self._server.send(peer, answer)
            if self._lost:
                self._server.send(peer, self._losses().pack())
            while True:
                report = WorkerReport.unpack((yield b""))
                self._heard[worker] = self._clock()
                self._handle(worker, report)
        except ProtocolError as error:
            if worker is None:
                # A worker with another secret then fails at once instead of trying again.
                self._server.send(peer, REFUSAL)
            self._server.drop(peer, str(error))
        except Exception as error:
            # Of the policy. The worker is not lost, and must not be blamed.
            self._fail(error)
        finally:
            if worker is None:
                self._refused(peer)
            elif not self._server.is_closing:
                del self._clients[worker]
                self._lost.add(worker)
                # Not logged, because workers leave one after the other at the end of the program. A worker that waits
                # for an update raises an error.
                self._broadcast(self._losses())

    def _fail(self, error: Exception) -> None:
        self.on_error(error)
        self._server.close()

    def _introduced(self, peer: _sockets.Peer, line: bytes, nonce: str) -> tuple[int, bytes]:
        """Reads the worker's claim; returns its index and the answer."""
        worker, answer = read_claim(line, self._secret, len(self._names), nonce)
        if worker in self._clients or worker in self._lost:
            raise ProtocolError(f"says that it is {self._names[worker]}, which was here before")
        peer.stay()
        self._clients[worker], self._heard[worker] = peer, self._clock()
        return worker, answer

    def _refused(self, peer: _sockets.Peer) -> None:
        self._num_refused += 1
        if self._num_refused <= _MOST_LINES and not self._server.is_closing:
            self._say(f"the quorum server closed a connection from {peer.name}, which {peer.reason}")

    def _tick(self) -> None:
        now = self._clock()
        if self._num_refused > _MOST_LINES:
            self._say(f"the quorum server closed {self._num_refused - _MOST_LINES} more connections of strangers")
        self._num_refused = 0
        for worker, peer in list(self._clients.items()):
            if now - self._heard[worker] > SILENCE_SECS:
                self._server.drop(peer, f"has been silent for {SILENCE_SECS:.0f} s")
        try:
            missing = max(0, self._policy.replicas_to_aggregate - len(self._policy.contributors))
        except Exception as error:
            self._fail(error)
        else:
            self._broadcast(self._verdict(Kind.STATUS, bytes(map(self._doing, self._all())), count=missing))

    def _broadcast(self, verdict: Verdict) -> None:
        line = verdict.pack()
        for peer in list(self._clients.values()):
            self._server.send(peer, line)

    def _losses(self) -> Verdict:
        return self._verdict(Kind.LOST, bytes(worker in self._lost for worker in self._all()))

    # Reports of the workers.

    def _handle(self, worker: int, report: WorkerReport) -> None:
        now, step = self._clock(), self._policy.step
        if report.act == Act.ALIVE:
            return
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
        marks = update_marks(len(self._names), update.contributors, update.dropped)
        self._broadcast(Verdict(Kind.UPDATE, update.step - 1, marks, examples, update.wait_secs, update.spread_secs))
        for change in update.changes:
            self._say(change.text)

    def _end(self, number: int, now: float) -> None:
        """Ends the pass over the data for all workers, because the data of one worker have ended."""
        self._ended.add(number)
        self._opened_step = -1
        for worker in self._all():
            # Contributions of this pass are dropped. A worker that still computes reports ARRIVED later.
            self._policy.withdraw(worker, now)
        self._broadcast(self._verdict(Kind.END, bytes(len(self._names)), count=number))

    def _verdict(self, kind: Kind, marks: bytes, count: int = 0) -> Verdict:
        return Verdict(kind, self._policy.step, marks, count)

    def _doing(self, worker: int) -> Doing:
        if worker in self._policy.contributors or self._policy.is_spare(worker):
            return Doing.ARRIVED
        if self._wanted.get(worker) != self._policy.step:
            return Doing.ELSEWHERE
        return Doing.LATE if self._started.get(worker, self._policy.step) < self._policy.step else Doing.COMPUTING

    def _all(self) -> range:
        return range(len(self._names))
