# SPDX-License-Identifier: Apache-2.0
"""Rules for the exit codes of all tasks of an all-reduce job when one fails, so that Kubernetes counts one failure."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from tfdist import _sockets
from tfdist.launchers.requests import HOPELESS_EXIT_CODES, TRY_AGAIN_EXIT_CODE
from tfdist.launchers.supervise.verdict import FirstFailure

# Fails the Job of this pod regardless of its count of failures. It is no code of sysexits.h, and no signal.
GIVEN_UP_EXIT_CODE = 79
# SIGTERM ended a script without a handler: the pod was deleted, and Kubernetes knows the reason.
_ENDED_BY_SIGTERM = 143
PREEMPTIONS = (TRY_AGAIN_EXIT_CODE, _ENDED_BY_SIGTERM)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Decides the exit codes of all tasks from the first failure.

    Args:
      max_restarts: number of failures after which the job still restarts.
      max_preemptions: number of preemptions after which the job still restarts.
      peer_exit_code: exit code of a task after the failure of another; `TRY_AGAIN_EXIT_CODE` if each pod is counted.
      kinds: number of Kubernetes Jobs with these tasks; each has its own count of failures.
    """

    max_restarts: int
    max_preemptions: int
    peer_exit_code: int = TRY_AGAIN_EXIT_CODE
    kinds: int = 1

    def exit_codes(self, first: int | None, failures: int) -> tuple[int | None, int]:
        """Returns the exit code of the task that failed first (None for its script's own), and that of the others.

        Args:
          first: exit code of the script that failed first; None for a lost pod.
          failures: number of failures counted before, of all tasks.
        """
        if first in PREEMPTIONS:
            return None, TRY_AGAIN_EXIT_CODE
        if self.kinds > 1 and first in HOPELESS_EXIT_CODES:
            return None, GIVEN_UP_EXIT_CODE
        if self.kinds > 1 and first is not None and failures >= self.max_restarts:
            return GIVEN_UP_EXIT_CODE, GIVEN_UP_EXIT_CODE
        return None, self.peer_exit_code

    def are_preemptions_used_up(self, counts: Sequence[Counts]) -> bool:
        """Returns True if the job was preempted more than `max_preemptions` times."""
        restarts = max(each.failures + each.ignored for each in counts)
        return restarts - sum(each.failures for each in counts) > self.max_preemptions


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of earlier failures of a task's pods: those that Kubernetes counted, and those that it ignored."""

    failures: int = 0
    ignored: int = 0


@dataclasses.dataclass(frozen=True)
class PodVerdict:
    """The leader's decision about the end of one task.

    Attributes:
      exit_code: exit code of the task; None for its script's own.
      why: the cause, in words.
      hold_secs: time for the script to end by itself, for example to save its work after a preemption.
    """

    exit_code: int | None
    why: str = ""
    hold_secs: float = 0.0


# Messages between the wrappers of a job's pods: lines of JSON, authenticated with the job's secret.


GREETING_SECS = 10.0
_PROTOCOL = "pods"


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel detect within half a minute that a host is lost, for example without power."""
    connection.settimeout(None)
    _sockets.keep_alive(connection, idle_secs=10, every_secs=5, probes=4)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_message(lines: BinaryIO) -> dict[str, Any]:
    """Reads the next message; returns {} at the end.

    Raises:
      ValueError: the line is no message.
      OSError: the connection broke.
    """
    line = lines.readline(_sockets.LINE_BYTES)
    if not line:
        return {}
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("not a message") from None
    if not isinstance(message, dict) or not line.endswith(b"\n"):
        raise ValueError("not a message")
    return message


def close_connection(connection: socket.socket) -> None:
    """Closes a connection, even if another thread is reading from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


# Ends the pods of an all-reduce job together, so that Kubernetes counts one failure, and all pods restart at once.
#
# When one worker fails, TensorFlow fails on all other workers, too, each with its own error. Kubernetes would count
# each of them as a failure. So the wrappers of the tasks connect to the wrapper of the first task, the leader, which
# decides:
#
#     worker:1                          the leader                         worker:2
#       joins                    --->                               <---     joins
#                                       script ends with code 0
#                                <---   "worker:0 has succeeded"     --->     a wait for it to start ends
#       script ends with code 1
#       "ended with 1"           --->   worker:1 failed first
#                                <---   "use your own code"
#                                       "end with 75"               --->     ends its script, and ends with 75
#     Kubernetes counts this one                                           ... and ignores this one
#
# A member whose connection breaks is lost, and all others end. A successful script waits for the other tasks, because
# an all-reduce job that restarts needs all of its workers. The members prove that they know the job's secret.


_LINGER_SECS = 5.0
_NO_RESOURCES_SECS = 0.05


class Leader:
    """Server beside the first task, which decides the end of all tasks of the job.

    Args:
      tasks: names of all members, such as "worker:0".
      rules: decide the exit codes.
      port: port to listen at.
      secret: shared secret of the job.
      hold_secs: time for scripts to save their work after a preemption.
      say: writes a line to the log.

    Raises:
      OSError: the leader can't listen at the port.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        rules: Rules,
        port: int,
        secret: str,
        hold_secs: float = 0.0,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._say = say
        self._tasks = frozenset(tasks)
        self._rules = rules
        self._secret = secret.encode()
        self._hold_secs = hold_secs
        self._changed = threading.Condition()
        self._members: dict[str, socket.socket] = {}
        self._counts: dict[str, Counts] = {}
        self._succeeded: set[str] = set()
        self._failed: set[str] = set()
        self._first = FirstFailure()
        self._is_decided = False
        self._late: PodVerdict | None = None
        self._unheard: set[str] = set()
        # Connections without a complete handshake, with their addresses, the oldest first.
        self._strangers: dict[socket.socket, str] = {}
        self._server = _sockets.listen_everywhere(port)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="tfdist pod group", daemon=True).start()

    @property
    def tasks_met(self) -> frozenset[str]:
        """Names of the members that have joined."""
        with self._changed:
            return frozenset(self._counts)

    def close(self) -> None:
        """Closes the server, once the members have acknowledged the verdict."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard, _LINGER_SECS)
            self._is_decided = True
            members = list(self._members.values())
            while self._strangers:
                self._make_room()
        close_connection(self._server)
        for member in members:
            close_connection(member)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._server.accept()
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno not in _sockets.NO_RESOURCES:
                    return  # Closed.
                with self._changed:
                    self._make_room()
                    self._changed.wait(_NO_RESOURCES_SECS)
                continue
            with self._changed:
                if len(self._strangers) >= _sockets.MOST_STRANGERS:
                    self._make_room()
                self._strangers[connection] = str(address[0])
            threading.Thread(target=self._serve, args=(connection,), name="tfdist pod member", daemon=True).start()

    def _make_room(self) -> None:
        """Closes a connection without a complete handshake; a member that is closed so retries."""
        if self._strangers:
            oldest = _sockets.to_give_way(self._strangers, self._strangers.values())
            del self._strangers[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # Its thread closes it.

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError),
            connection.makefile("rb") as lines,
        ):
            try:
                task, is_member = self._greet(connection, lines)
            finally:
                self._remove_stranger(connection)
            if not is_member:
                return
            try:
                while message := read_message(lines):
                    if "ended" in message:
                        self._note_end(task, int(message["ended"]))
                    elif "heard" in message:
                        self._note_heard(task)
            finally:
                self._leave(task, connection)

    def _remove_stranger(self, connection: socket.socket) -> bool:
        """Removes a connection from `_strangers`; returns False if it was closed for a newer one."""
        with self._changed:
            return self._strangers.pop(connection, None) is not None

    def _greet(self, connection: socket.socket, lines: BinaryIO) -> tuple[str, bool]:
        """Runs the handshake; returns the member's name, and True if it has joined this attempt."""
        connection.settimeout(GREETING_SECS)
        own = secrets.token_hex(16)
        send_message(connection, {"nonce": own})
        hello = read_message(lines)
        task, counts, nonce = str(hello["task"]), Counts(*map(int, hello["counts"])), str(hello["nonce"])
        words = (_PROTOCOL, "member", own, nonce, task, counts.failures, counts.ignored)
        if task not in self._tasks or not _sockets.is_proof(str(hello["proof"]), self._secret, *words):
            raise ValueError("no member of this job")
        keep_alive(connection)
        return task, self._join(
            task, counts, connection, _sockets.proof(self._secret, _PROTOCOL, "leader", nonce, own).hex()
        )

    def _join(self, task: str, counts: Counts, connection: socket.socket, proof: str) -> bool:
        """Sends the leader's proof, unless the pod is of the next attempt; returns False if the pod has not joined.

        A member with this proof follows this leader to the end, and ends with 75 if it gets no verdict. A member
        without it retries until the next leader runs, which costs no preemption.
        """
        with self._changed:
            if not self._remove_stranger(connection):
                raise ConnectionAbortedError  # It was closed for a newer connection.
            if task in self._members:
                # The pod was replaced before its old connection broke, for example because its node lost power.
                self._decide(task, None)
            if self._is_decided:
                if self._late and task not in self._counts:
                    # The pod is of this attempt, and joined after the failure.
                    self._counts[task] = counts
                    send_message(connection, {"proof": proof})
                    send_message(connection, dataclasses.asdict(self._late))
                return False
            # Under the lock, so that no verdict is sent before the proof.
            send_message(connection, {"proof": proof})
            self._members[task] = connection
            self._counts[task] = counts
            for name in sorted(self._succeeded - {task}):
                self._tell_of_success(connection, name)
            if len(self._counts) == len(self._tasks):
                self._begin()
            return True

    def _begin(self) -> None:
        """Ends all tasks at once if the job was preempted too often."""
        if self._rules.are_preemptions_used_up(list(self._counts.values())):
            why = f"the job is not started again: --max_preemptions={self._rules.max_preemptions} is used up"
            self._announce({name: PodVerdict(GIVEN_UP_EXIT_CODE, why) for name in self._members})
        else:
            self._say(f"all {len(self._tasks)} tasks have met; they end and start again together")

    def _note_end(self, task: str, code: int) -> None:
        with self._changed:
            if self._is_decided:
                return
            if code:
                self._failed.add(task)
                self._first.ended(task, code, time.monotonic())
                if self._first.is_decided(time.monotonic()) or self._failed == self._tasks:
                    self._decide_first()
                elif len(self._failed) == 1:
                    threading.Thread(target=self._decide_later, name="tfdist pod verdict", daemon=True).start()
                return
            self._succeeded.add(task)
            for name, connection in self._members.items():
                if name != task:
                    self._tell_of_success(connection, task)
            if self._succeeded == self._tasks:
                self._announce({name: PodVerdict(0) for name in self._members})

    def _tell_of_success(self, connection: socket.socket, task: str) -> None:
        with contextlib.suppress(OSError):  # The thread of the connection detects the loss, too.
            send_message(connection, {"succeeded": task})

    def _decide_later(self) -> None:
        """Decides once no other task can be the cause any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided, max(0.0, self._first.deadline_secs - time.monotonic()))
            self._decide_first()

    def _decide_first(self) -> None:
        if self._first.failure is not None:
            self._decide(self._first.failure.task, self._first.failure.code)

    def _note_heard(self, task: str) -> None:
        with self._changed:
            self._unheard.discard(task)
            self._changed.notify_all()

    def _leave(self, task: str, connection: socket.socket) -> None:
        with self._changed:
            if self._members.get(task) is connection:
                del self._members[task]
                self._decide(task, None)
            self._note_heard(task)

    def _decide(self, first: str, code: int | None) -> None:
        if self._is_decided:
            return
        failures = sum(each.failures for each in self._counts.values())
        own, others = self._rules.exit_codes(code, failures)
        why = f"{first} " + (
            "can't be reached any more" if code is None else f"ended with exit code {code}, as the first"
        )
        if own == GIVEN_UP_EXIT_CODE:
            why += f", and --max_restarts={self._rules.max_restarts} is used up"
        hold_secs = self._hold_secs if code == TRY_AGAIN_EXIT_CODE else 0.0
        self._late = PodVerdict(others, why, hold_secs)
        verdicts = dict.fromkeys(self._members, self._late)
        self._announce({**verdicts, first: PodVerdict(own, why)})

    def _announce(self, verdicts: dict[str, PodVerdict]) -> None:
        self._is_decided = True
        for task, connection in self._members.items():
            with contextlib.suppress(OSError):
                self._unheard.add(task)
                send_message(connection, dataclasses.asdict(verdicts[task]))
        self._changed.notify_all()


# Connection of one task's wrapper to the leader of an all-reduce job's pods. See `pod_group`.


_RETRY_SECS = 0.5
# Time limits for reaching the leader: before the script starts, and after it has ended.
_JOIN_SECS = 30.0
_MEET_SECS = 60.0
_HOPELESS_MEET_SECS = 5.0
_MEMBER_VERDICT_SECS = 30.0


class Member:
    """Connection of one task's wrapper to the leader.

    Args:
      task: name of the task.
      address: host and port of the leader.
      secret: shared secret of the job.
      counts: numbers of earlier failures of this task's pods.
      lost_exit_code: exit code of this task if the leader is lost.
      say: writes a line to the log.
      on_success: called with the name of another task whose script has ended with code 0.
    """

    def __init__(
        self,
        task: str,
        address: tuple[str, int],
        secret: str,
        counts: Counts,
        lost_exit_code: int,
        say: Callable[[str], object],
        on_success: Callable[[str], object] = lambda task: None,
    ) -> None:
        self._task = task
        self._address = address
        self._secret = secret.encode()
        self._counts = counts
        self._lost = PodVerdict(
            lost_exit_code, f"{address[0]}, the host of the job's first task, can't be reached any more"
        )
        self._say = say
        self._on_success = on_success
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._verdict: PodVerdict | None = None
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
                close_connection(self._connection)

    def _await_verdict(self, code: int, is_interrupted: Callable[[], bool]) -> PodVerdict | None:
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
                    return PodVerdict(None) if alone else self._lost
                if self._connection is not None and code and waited_secs > _MEMBER_VERDICT_SECS:
                    return self._lost
                self._changed.wait(_RETRY_SECS)
            return self._verdict

    def _tell_end(self) -> None:
        if self._connection is not None and self._code is not None:
            with contextlib.suppress(OSError):  # The reading thread detects the error, too.
                send_message(self._connection, {"ended": self._code})

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            with (
                contextlib.suppress(OSError, ValueError, KeyError, TypeError),
                socket.create_connection(self._address, GREETING_SECS) as connection,
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
                while "succeeded" in (message := read_message(lines)):
                    self._on_success(str(message["succeeded"]))
            verdict = self._lost
            with contextlib.suppress(TypeError):
                verdict = PodVerdict(**message) if message else self._lost
            with self._changed:
                self._verdict, self._verdict_time = verdict, time.monotonic()
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                send_message(connection, {"heard": True})
            self._is_closed.wait()

    def _greet(self, connection: socket.socket, lines: BinaryIO) -> None:
        own, counts = secrets.token_hex(16), self._counts
        nonce = str(read_message(lines)["nonce"])
        numbers = (counts.failures, counts.ignored)
        proof = _sockets.proof(self._secret, _PROTOCOL, "member", nonce, own, self._task, *numbers).hex()
        send_message(connection, {"task": self._task, "counts": numbers, "nonce": own, "proof": proof})
        if not _sockets.is_proof(str(read_message(lines)["proof"]), self._secret, _PROTOCOL, "leader", own, nonce):
            raise ValueError("no leader of this job")
        keep_alive(connection)
