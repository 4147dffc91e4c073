# SPDX-License-Identifier: Apache-2.0
"""Wire format between a worker and the quorum server. Pure functions: no sockets, no TensorFlow.

A connection begins with a handshake, in which both sides prove that they know the job's secret; the secret itself is
never sent. Then each side sends frames of one size:

    server -> worker   greeting   magic, nonce
    worker -> server   claim      magic, index of the worker, nonce, proof
    server -> worker   proof, or a refusal
    worker -> server   reports    state of this worker
    server -> worker   verdicts   contributors of an update, or the status of all workers

A proof is the HMAC-SHA256 (RFC 2104) of both nonces, the role of the sender and the worker's index. Any other message
raises `ProtocolError`, and the receiver closes the connection.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import math
import struct
from collections.abc import Iterator

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
class Report:
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
    def unpack(cls, frame: bytes) -> Report:
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
    return _CLAIM.pack(MAGIC, worker, nonce, _proof(secret, b"worker", worker, server_nonce, nonce))


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
    if not hmac.compare_digest(proof, _proof(secret, b"worker", worker, server_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")
    if worker >= num_workers:
        raise ProtocolError(f"says that it is worker {worker} of {num_workers}")
    return worker, _proof(secret, b"server", worker, server_nonce, nonce)


def check_answer(answer: bytes, secret: bytes, worker: int, server_nonce: bytes, nonce: bytes) -> None:
    """Checks that an answer to a claim is from the quorum server of this job.

    Raises:
      ProtocolError: the sender doesn't know the secret.
    """
    if not hmac.compare_digest(answer, _proof(secret, b"server", worker, server_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")


def _proof(secret: bytes, role: bytes, worker: int, server_nonce: bytes, nonce: bytes) -> bytes:
    # All parts but the role have one length each, and no role begins with another: two messages can't be the same.
    message = role + struct.pack("!I", worker) + server_nonce + nonce
    return hmac.digest(secret, message, "sha256")
