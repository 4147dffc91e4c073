# SPDX-License-Identifier: Apache-2.0
"""Connection of one task's wrapper to the leader of an all-reduce job's pods. See `pod_leader`."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from tfdist.launchers import pod_wire as wire
from tfdist.launchers.pod_rules import Counts, Verdict
from tfdist.launchers.requests import HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE

_RETRY_SECS = 0.5
# How long a member tries to reach the leader: before its script starts, and after the script has ended.
_JOIN_SECS = 30.0
_MEET_SECS = 60.0
_HOPELESS_MEET_SECS = 5.0
_VERDICT_SECS = 30.0


class Member:
    """Connection of one task's wrapper to the leader.

    Args:
      task: name of the task.
      address: host and port of the leader.
      secret: shared secret of the job.
      counts: numbers of earlier failures of this task's pods.
      lost_exit_code: exit code of this task if the leader is lost.
      say: writes a line to the log.
    """

    def __init__(
        self,
        task: str,
        address: tuple[str, int],
        secret: str,
        counts: Counts,
        lost_exit_code: int,
        say: Callable[[str], object],
    ) -> None:
        self._task = task
        self._address = address
        self._secret = secret
        self._counts = counts
        self._lost = Verdict(
            lost_exit_code, f"{address[0]}, the host of the job's first task, can't be reached any more"
        )
        self._say = say
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._verdict: Verdict | None = None
        self._verdict_time = 0.0
        self._code: int | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._follow, name="tfdist pod group", daemon=True).start()

    def join(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Waits up to `_JOIN_SECS` for the leader; a script that failed before would count in the next attempt."""
        deadline = time.monotonic() + _JOIN_SECS
        with self._changed:
            while self._connection is None and time.monotonic() < deadline and not is_interrupted():
                self._changed.wait(_RETRY_SECS)

    def is_over(self) -> bool:
        """Returns True if the script must end, because another task has failed."""
        with self._changed:
            verdict, since = self._verdict, time.monotonic() - self._verdict_time
        return verdict is not None and since >= verdict.hold_secs

    def finish(self, code: int, is_interrupted: Callable[[], bool] = lambda: False) -> int:
        """Reports the end of the script, waits for the leader's verdict, and returns the exit code of this task.

        Args:
          code: exit code of the script.
          is_interrupted: returns True if a signal ends the wait for the other tasks.
        """
        with self._changed:
            self._code = code
            self._tell_end()
        verdict = self._await_verdict(code, is_interrupted)
        if verdict is None:
            return TRY_AGAIN_EXIT_CODE
        result = code if verdict.exit_code is None else verdict.exit_code
        if result != code:
            self._say(f"{verdict.why}; this task ends with exit code {result}")
        return result

    def close(self) -> None:
        """Closes the connection."""
        self._is_closed.set()
        with self._changed:
            if self._connection:
                wire.close(self._connection)

    def _await_verdict(self, code: int, is_interrupted: Callable[[], bool]) -> Verdict | None:
        """Waits for the verdict; returns None if a signal arrived first."""
        # Success and a permanent failure need no leader. Any other failure without a leader comes from a lost peer.
        alone = code == 0 or code in HOPELESS_EXIT_CODES
        meeting_secs = _MEET_SECS if code == 0 else _HOPELESS_MEET_SECS if alone else 0.0
        start = time.monotonic()
        with self._changed:
            while self._verdict is None:
                if code == 0 and is_interrupted():
                    return None
                waited_secs = time.monotonic() - start
                if self._connection is None and waited_secs >= meeting_secs:
                    return Verdict(None) if alone else self._lost
                if self._connection is not None and code and waited_secs > _VERDICT_SECS:
                    return self._lost
                self._changed.wait(_RETRY_SECS)
            return self._verdict

    def _tell_end(self) -> None:
        if self._connection is not None and self._code is not None:
            with contextlib.suppress(OSError):  # The reading thread detects the error, too.
                wire.send(self._connection, {"ended": self._code})

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            with (
                contextlib.suppress(OSError, ValueError, KeyError, TypeError),
                socket.create_connection(self._address, wire.GREETING_SECS) as connection,
            ):
                self._talk(connection)
                return
            self._is_closed.wait(_RETRY_SECS)

    def _talk(self, connection: socket.socket) -> None:
        """Joins a leader and reads its verdict; raises only before it has joined."""
        with connection.makefile("rb") as lines:
            self._greet(connection, lines)
            with self._changed:
                self._connection = connection
                self._tell_end()
                self._changed.notify_all()
            message: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                message = wire.read(lines)
            verdict = self._lost
            with contextlib.suppress(TypeError):
                verdict = Verdict(**message) if message else self._lost
            with self._changed:
                self._verdict, self._verdict_time = verdict, time.monotonic()
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                wire.send(connection, {"heard": True})
            self._is_closed.wait()

    def _greet(self, connection: socket.socket, lines: BinaryIO) -> None:
        own, counts = secrets.token_hex(16), self._counts
        nonce = str(wire.read(lines)["nonce"])
        proof = wire.proof(self._secret, "member", nonce, own, self._task, counts.failures, counts.ignored)
        numbers = (counts.failures, counts.ignored)
        wire.send(connection, {"task": self._task, "counts": numbers, "nonce": own, "proof": proof})
        if not hmac.compare_digest(wire.proof(self._secret, "leader", own, nonce), str(wire.read(lines)["proof"])):
            raise ValueError("no leader of this job")
        wire.keep_alive(connection)
