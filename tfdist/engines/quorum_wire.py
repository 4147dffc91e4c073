# SPDX-License-Identifier: Apache-2.0
"""What travels between a worker and the arrival board, byte by byte. Pure: no sockets, no TensorFlow.

A connection begins with a handshake, in which both sides prove that they know the job's secret, which itself never
travels; then each side sends frames of one size:

    board  -> worker   greeting   magic, nonce
    worker -> board    claim      magic, number of the worker, nonce, proof
    board  -> worker   proof, or a refusal
    worker -> board    reports    what this worker does
    board  -> worker   verdicts   what an update is made of, and who is waited for

A proof is the HMAC-SHA256 (RFC 2104) of both nonces, who proves it and the worker's number. What is not exactly this is
a `ProtocolError`, and the reason to close a connection.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import struct
from collections.abc import Iterator

MAGIC = b"tfdist board 1\r\n"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_CLAIM = struct.Struct(f"!{len(MAGIC)}sI{NONCE_BYTES}s{PROOF_BYTES}s")
_REPORT = struct.Struct("!BIQQ")
_VERDICT = struct.Struct("!BQQdd")

GREETING_BYTES = len(MAGIC) + NONCE_BYTES
CLAIM_BYTES = _CLAIM.size
# In place of a proof, which it can't be but with a chance of 2 to the -256.
REFUSAL = b"refused".ljust(PROOF_BYTES, b"\0")
REPORT_BYTES = _REPORT.size

# In `Verdict.marks` of an update: this bit, and how many gradients of the worker were dropped.
CONTRIBUTED = 0x80
_MOST_DROPPED = 0x7F


class ProtocolError(Exception):
    """What came from the other side is not what it must be. The message is a part of a sentence."""


class Act(enum.IntEnum):
    """What a worker reports."""

    ALIVE = 0
    WANTED = 1  # Keras asks for the update of this step, while it is busy with an earlier one
    STARTED = 2  # Keras asks, and it computes a contribution
    ARRIVED = 3  # it has computed it
    ENDED = 4  # its data have come to their end


class Kind(enum.IntEnum):
    """What a verdict of the board is about."""

    STATUS = 0  # who is waited for: a `Doing` for each worker; `count` is how many contributions are missing
    UPDATE = 1  # make the update of this step; `count` is how many examples it is made of
    END = 2  # this pass over the data is over; `count` is its number
    LOST = 3  # these workers, with a mark that is not zero, are gone


class Doing(enum.IntEnum):
    """What a worker does, as far as the board knows."""

    ELSEWHERE = 0
    LATE = 1
    COMPUTING = 2
    ARRIVED = 3


@dataclasses.dataclass(frozen=True)
class Report:
    """A frame from a worker to the board.

    Attributes:
      act: what it does.
      number: of the pass over the data, from 1.
      step: the global step.
      examples: how many the contribution is of.
    """

    act: Act
    number: int = 0
    step: int = 0
    examples: int = 0

    def pack(self) -> bytes:
        """The frame, `REPORT_BYTES` long."""
        return _REPORT.pack(self.act, self.number, self.step, self.examples)

    @classmethod
    def unpack(cls, frame: bytes) -> Report:
        """Reads a frame.

        Raises:
          ProtocolError: it is none.
        """
        act, *rest = _REPORT.unpack(frame)
        if act >= len(Act):
            raise ProtocolError(f"sent a report of no known kind, {act}")
        return cls(Act(act), *rest)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A frame from the board to a worker.

    Attributes:
      kind: what it is about.
      step: the global step.
      count: see `Kind`.
      wait_secs: of an update, see `tfdist.policies.base.Update`.
      spread_secs: likewise.
      marks: one byte for each worker; see `Kind`, `Doing` and `CONTRIBUTED`.
    """

    kind: Kind
    step: int
    marks: bytes
    count: int = 0
    wait_secs: float = 0.0
    spread_secs: float = 0.0

    def pack(self) -> bytes:
        """The frame, `verdict_bytes` long."""
        return _VERDICT.pack(self.kind, self.step, self.count, self.wait_secs, self.spread_secs) + self.marks

    @classmethod
    def unpack(cls, frame: bytes) -> Verdict:
        """Reads a frame.

        Raises:
          ProtocolError: it is none.
        """
        kind, step, count, wait_secs, spread_secs = _VERDICT.unpack_from(frame)
        if kind >= len(Kind):
            raise ProtocolError(f"sent a verdict of no known kind, {kind}")
        return cls(Kind(kind), step, frame[_VERDICT.size :], count, wait_secs, spread_secs)

    def contributors(self) -> tuple[int, ...]:
        """Of an update: the workers that it is made from."""
        return tuple(worker for worker, mark in enumerate(self.marks) if mark & CONTRIBUTED)

    def dropped(self) -> tuple[int, ...]:
        """Of an update: the workers whose gradients were dropped, each as often as that happened."""
        return tuple(worker for worker, mark in enumerate(self.marks) for _ in range(mark & _MOST_DROPPED))


def verdict_bytes(num_workers: int) -> int:
    """The size of a verdict in a job of so many workers."""
    return _VERDICT.size + num_workers


def update_marks(num_workers: int, contributors: tuple[int, ...], dropped: tuple[int, ...]) -> bytes:
    """The marks of an update."""
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
        """Adds what came."""
        self._buffer += data

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes, or None if they have not all come."""
        if len(self._buffer) < size:
            return None
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def take_all(self, size: int) -> Iterator[bytes]:
        """All whole pieces of `size` bytes."""
        while (piece := self.take(size)) is not None:
            yield piece


def greeting(nonce: bytes) -> bytes:
    """What the board says first."""
    return MAGIC + nonce


def read_greeting(data: bytes) -> bytes:
    """The nonce of a greeting.

    Raises:
      ProtocolError: it is none.
    """
    if not data.startswith(MAGIC):
        raise ProtocolError("does not speak this protocol")
    return data[len(MAGIC) :]


def claim(secret: bytes, worker: int, board_nonce: bytes, nonce: bytes) -> bytes:
    """How a worker introduces itself."""
    return _CLAIM.pack(MAGIC, worker, nonce, _proof(secret, b"worker", worker, board_nonce, nonce))


def read_claim(data: bytes, secret: bytes, num_workers: int, board_nonce: bytes) -> tuple[int, bytes]:
    """Checks a claim.

    Returns:
      The worker's number, and what the board answers.

    Raises:
      ProtocolError: it is none, or from somebody who does not know the secret.
    """
    magic, worker, nonce, proof = _CLAIM.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("does not speak this protocol")
    if not hmac.compare_digest(proof, _proof(secret, b"worker", worker, board_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")
    if worker >= num_workers:
        raise ProtocolError(f"says that it is worker {worker} of {num_workers}")
    return worker, _proof(secret, b"board", worker, board_nonce, nonce)


def check_answer(answer: bytes, secret: bytes, worker: int, board_nonce: bytes, nonce: bytes) -> None:
    """Checks that it is the board that a worker talks to.

    Raises:
      ProtocolError: it does not know the secret.
    """
    if not hmac.compare_digest(answer, _proof(secret, b"board", worker, board_nonce, nonce)):
        raise ProtocolError("does not know this job's secret")


def _proof(secret: bytes, role: bytes, worker: int, board_nonce: bytes, nonce: bytes) -> bytes:
    # All parts but the role have one length each, and no role begins with another: two messages can't be the same.
    message = role + struct.pack("!I", worker) + board_nonce + nonce
    return hmac.digest(secret, message, "sha256")
