# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the quorum server (`quorum_server.QuorumServer`). No TensorFlow import."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from tfdist import _forks, _sockets
from tfdist.coordination import keepalive, quorum_server
from tfdist.coordination.quorum_server import Act, Doing, Kind, ProtocolError, Verdict, WorkerReport

_CONNECT_SECS = 30.0
_RETRY_SECS = 0.1
_JOIN_SECS = 10.0
_NONCE_BYTES = 32
_DOING = {
    Doing.ELSEWHERE: " (has not come to this step yet)",
    Doing.LATE: " (still busy with an earlier step)",
    Doing.COMPUTING: "",
}


class _CutOffError(ConnectionError):
    """The server closed the connection before the handshake was complete."""


class QuorumClient:
    """Connection of one worker: sends its reports to the quorum server, and receives the server's verdicts.

    Any thread may send a report; one thread waits for verdicts.

    Args:
      address: host and port of the server.
      worker: this worker's index.
      names: the workers' names; the server runs in the first one's process.
      secret: shared secret of the job.
      silence_secs: time without a message after which the server counts as dead.
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
        silence_secs: float = quorum_server.SILENCE_SECS,
        stall_timeout_secs: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._names = tuple(names)
        self._silence_secs = silence_secs
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
        # Bytes of a line that has not come whole.
        self._buffer = b""
        self._socket = self._connect(address, secret)
        self._thread = threading.Thread(target=self._listen, name="tfdist quorum client", daemon=True)
        self._thread.start()

    # Reports.

    def want(self, number: int, step: int) -> None:
        """Reports that Keras asks for the update of `step`, in pass `number` over the data; `started` implies it."""
        self._report(WorkerReport(Act.WANTED, number, step))

    def started(self, number: int, step: int) -> None:
        """Reports that Keras asks for the update, and that this worker starts to compute a contribution to it."""
        self._report(WorkerReport(Act.STARTED, number, step))

    def arrived(self, number: int, step: int, examples: int, secs: float, input_secs: float = 0.0) -> None:
        """Reports that this worker has computed its contribution; see `WorkerReport`."""
        self._report(WorkerReport(Act.ARRIVED, number, step, examples, secs, min(input_secs, secs)))

    def ended(self, number: int, step: int) -> None:
        """Reports that this worker's data have ended."""
        self._report(WorkerReport(Act.ENDED, number, step))

    def _report(self, report: WorkerReport) -> None:
        try:
            with self._sending:
                self._socket.sendall(report.pack())
        except OSError as error:
            self.fail(f"{self._server} is gone: {error.strerror or error}")

    # Verdicts.

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
            name + _DOING[Doing(mark)]
            for name, mark in zip(self._names, status.marks, strict=True)
            if mark != Doing.ARRIVED
        ]
        return f"{status.count} of " + ", ".join(absent) if absent else self._server

    def close(self) -> None:
        """Closes the connection; may be called again."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
        self._socket.close()

    # The connection.

    def _connect(self, address: tuple[str, int], secret: bytes) -> socket.socket:
        until = time.monotonic() + _CONNECT_SECS
        while True:
            try:
                return self._connect_once(address, secret)
            except _CutOffError:
                # The server drops unknown connections when there are too many. A refusal has an answer of its own.
                if time.monotonic() > until:
                    raise
                self._closing.wait(_RETRY_SECS)

    def _connect_once(self, address: tuple[str, int], secret: bytes) -> socket.socket:
        try:
            connection = _forks.keep(socket.create_connection(address, _CONNECT_SECS))
        except OSError as error:
            raise ConnectionError(f"{self._server} can't be reached: {error.strerror or error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._introduce(connection, secret)
            connection.settimeout(quorum_server.STATUS_EVERY_SECS)
        except OSError as error:
            connection.close()
            if isinstance(error, ConnectionError) and error.errno is None:
                raise
            raise ConnectionError(f"{self._server} does not answer: {error.strerror or error}") from error
        return connection

    def _introduce(self, connection: socket.socket, secret: bytes) -> None:
        self._buffer, nonce = b"", secrets.token_hex(_NONCE_BYTES)
        hint = "; TFDIST_JOB_SECRET must be the same for all workers"
        refused = f"{self._server} does not accept {self._names[self._worker]}"
        try:
            server_nonce = quorum_server.read_greeting(self._receive(connection) or self._cut_off(refused))
            connection.sendall(quorum_server.claim(secret, self._worker, server_nonce, nonce))
            answer = self._receive(connection) or self._cut_off(refused + hint)
            if answer == quorum_server.REFUSAL:
                raise ConnectionError(refused + hint)
            quorum_server.check_answer(answer, secret, self._worker, server_nonce, nonce)
        except ProtocolError as error:
            raise ConnectionError(f"{self._server} {error}{hint}") from None

    def _cut_off(self, text: str) -> NoReturn:
        raise _CutOffError(text)

    def _receive(self, connection: socket.socket) -> bytes:
        """Returns the next line; b"" if the server has closed the connection."""
        while b"\n" not in self._buffer:
            try:
                data = connection.recv(_sockets.LINE_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                return b""
            self._buffer += data
            if len(self._buffer) > 2 * _sockets.LINE_BYTES and b"\n" not in self._buffer:
                raise ProtocolError("sent a line without an end")
        line, end, self._buffer = self._buffer.partition(b"\n")
        return line + end

    def _listen(self) -> None:
        heard = told = self._clock()
        try:
            while not self._closing.is_set():
                if self._clock() - told >= quorum_server.STATUS_EVERY_SECS:
                    told = self._clock()
                    self._report(WorkerReport(Act.ALIVE))
                try:
                    line = self._receive(self._socket)
                except TimeoutError:
                    if self._clock() - heard > self._silence_secs:
                        self.fail(f"{self._server} has been silent for {self._silence_secs:.0f} s")
                        return
                    continue
                heard = self._clock()
                if not line:
                    self.fail(f"{self._server} is gone: it closed the connection")
                    return
                self._hear(Verdict.unpack(line))
        except (OSError, ProtocolError, ValueError) as error:
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
                self.lost = [name for name, mark in zip(self._names, verdict.marks, strict=True) if mark]
                self._error = self._error or f"{', '.join(self.lost)} has ended, or can't be reached any more"
            self._changed.notify_all()

    def fail(self, error: str | Exception) -> None:
        """Ends all waits with this error; a text is of the connection."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
