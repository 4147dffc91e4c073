# SPDX-License-Identifier: Apache-2.0
"""Ends the pods of an all-reduce job together, so that Kubernetes counts one failure, and all pods restart at once.

When one worker fails, TensorFlow fails on all other workers, too, each with its own error. Kubernetes would count each
of them as a failure. So the wrappers of the tasks connect to the wrapper of the first task, the leader, which decides:

    worker:1                          the leader                         worker:2
      joins                    --->                               <---     joins
      script ends with code 1
      "ended with 1"           --->   worker:1 failed first
                               <---   "use your own code"
                                      "end with 75"               --->     ends its script, and ends with 75
    Kubernetes counts this one                                           ... and ignores this one

A member whose connection breaks is lost, and all others end. A successful script waits for the other tasks, because an
all-reduce job that restarts needs all of its workers. The members prove that they know the job's secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

from tfdist import _line_server, _sockets
from tfdist.launchers import pod_wire as wire
from tfdist.launchers.pod_rules import GIVEN_UP_EXIT_CODE, Counts, Rules, Verdict
from tfdist.launchers.requests import CAUSE_SECS, TRY_AGAIN_EXIT_CODE

_LINGER_SECS = 5.0
_MOST_STRANGERS = 64
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
        self._secret = secret
        self._hold_secs = hold_secs
        self._changed = threading.Condition()
        self._members: dict[str, socket.socket] = {}
        self._counts: dict[str, Counts] = {}
        self._succeeded: set[str] = set()
        self._preempted: list[str] = []
        self._is_decided = False
        self._late: Verdict | None = None
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
        wire.close(self._server)
        for member in members:
            wire.close(member)

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
                if len(self._strangers) >= _MOST_STRANGERS:
                    self._make_room()
                self._strangers[connection] = str(address[0])
            threading.Thread(target=self._serve, args=(connection,), name="tfdist pod member", daemon=True).start()

    def _make_room(self) -> None:
        """Closes a connection without a complete handshake; a member that is closed so retries."""
        if self._strangers:
            oldest = _line_server.to_give_way(self._strangers, self._strangers.values())
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
                while message := wire.read(lines):
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
        connection.settimeout(wire.GREETING_SECS)
        own = secrets.token_hex(16)
        wire.send(connection, {"nonce": own})
        hello = wire.read(lines)
        task, counts, nonce = str(hello["task"]), Counts(*map(int, hello["counts"])), str(hello["nonce"])
        proof = wire.proof(self._secret, "member", own, nonce, task, counts.failures, counts.ignored)
        if task not in self._tasks or not hmac.compare_digest(proof, str(hello["proof"])):
            raise ValueError("no member of this job")
        wire.keep_alive(connection)
        return task, self._join(task, counts, connection, wire.proof(self._secret, "leader", nonce, own))

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
                    wire.send(connection, {"proof": proof})
                    wire.send(connection, dataclasses.asdict(self._late))
                return False
            # Under the lock, so that no verdict is sent before the proof.
            wire.send(connection, {"proof": proof})
            self._members[task] = connection
            self._counts[task] = counts
            if len(self._counts) == len(self._tasks):
                self._begin()
            return True

    def _begin(self) -> None:
        """Ends all tasks at once if the job was preempted too often."""
        if self._rules.are_preemptions_used_up(list(self._counts.values())):
            why = f"the job is not started again: --max_preemptions={self._rules.max_preemptions} is used up"
            self._announce({name: Verdict(GIVEN_UP_EXIT_CODE, why) for name in self._members})
        else:
            self._say(f"all {len(self._tasks)} tasks have met; they end and start again together")

    def _note_end(self, task: str, code: int) -> None:
        with self._changed:
            if self._is_decided:
                return
            if code == TRY_AGAIN_EXIT_CODE:
                self._preempted.append(task)
                if set(self._preempted) == self._tasks:
                    self._decide(self._preempted[0], code)
                elif len(self._preempted) == 1:
                    threading.Thread(target=self._decide_later, name="tfdist pod verdict", daemon=True).start()
                return
            if code:
                self._decide(task, code)
                return
            self._succeeded.add(task)
            if self._succeeded == self._tasks:
                self._announce({name: Verdict(0) for name in self._members})

    def _decide_later(self) -> None:
        """Decides for a preemption, unless another task fails within `CAUSE_SECS`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided, CAUSE_SECS)
            self._decide(self._preempted[0], TRY_AGAIN_EXIT_CODE)

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
        self._late = Verdict(others, why, hold_secs)
        verdicts = dict.fromkeys(self._members, self._late)
        self._announce({**verdicts, first: Verdict(own, why)})

    def _announce(self, verdicts: dict[str, Verdict]) -> None:
        self._is_decided = True
        for task, connection in self._members.items():
            with contextlib.suppress(OSError):
                self._unheard.add(task)
                wire.send(connection, dataclasses.asdict(verdicts[task]))
        self._changed.notify_all()
