# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: waits until all tasks of a cluster have started, before TensorFlow's server starts. No TensorFlow import.

TensorFlow's own start blocks silently, and can be neither interrupted nor watched from a thread, because it holds
Python's lock. So each task first listens at its own port, identifies itself to callers, and calls all others. A task
that has reached all others, and was reached by them, continues and starts TensorFlow's server on the same port.

    caller -> answering                   the caller connects
              answering -> caller         tfdist DIGEST TASK NONCE
    caller -> answering                   tfdist DIGEST TASK NONCE PROOF
              answering -> caller         tfdist PROOF
    caller -> answering                   tfdist met: the proof is right
              answering -> caller         tfdist met

A proof is that of `_sockets.proof`. Without a secret, tasks trust each other. The last two lines exist because the
answering task may start its TensorFlow server at once. A task that starts late can't tell that server from a foreign
one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tfdist import _log, _sockets
from tfdist.cluster import Cluster, Task, digest_of

_MAGIC = b"tfdist"
_PROTOCOL = "rendezvous"
MET = b"tfdist met\n"
REFUSED = b"tfdist refused\n"
# Result for a port at which TensorFlow's server answers: that task has met all others already.
_SERVING = "serving"
# Result for a task that has proved its identity, but whose last answer is missing.
_PROVED = "no answer to the end"
_PROBE_SECS = 2.0
_RETRY_SECS = 0.2
_CHECK_SECS = 0.5
_NONCE_BYTES = 32
_UNPROVED = "it does not know this job's secret: TFDIST_JOB_SECRET must be the same for all tasks, or for no task"


def meet(
    cluster: Cluster,
    timeout_secs: float,
    *,
    every_secs: float = 10.0,
    write: Callable[[str], object] | None = None,
    check: Callable[[], object] = lambda: None,
    secret: str = "",
) -> None:
    """Waits until all training tasks have reached each other at their addresses.

    Args:
      cluster: the tasks, and which one this is.
      timeout_secs: how long to wait.
      every_secs: interval of the lines that name the missing tasks.
      write: takes such a line; standard error by default.
      check: called at least twice a second; may raise to end the wait.
      secret: shared secret of the job; "" for none.

    Raises:
      TimeoutError: tasks are still missing. The message names them and the reasons.
      OSError: this task can't listen on its own port.
    """
    others = [task for task in cluster.training_tasks if task != cluster.task]
    search = _Search(cluster, others, secret.encode(), mutual=True)
    with answering(cluster, secret.encode(), search.was_asked_by):
        _complete(search, timeout_secs, every_secs, write or _log.say, check)


def reach(
    cluster: Cluster,
    tasks: Iterable[Task],
    timeout_secs: float,
    *,
    every_secs: float = 10.0,
    write: Callable[[str], object] | None = None,
    check: Callable[[], object] = lambda: None,
    name: str | None = None,
) -> None:
    """Waits until all of `tasks` answer at their addresses.

    Args:
      cluster: the tasks, and which one this is.
      tasks: the tasks to reach.
      timeout_secs: how long to wait.
      every_secs: interval of the lines that name the missing tasks.
      write: takes such a line; standard error by default.
      check: called at least twice a second; may raise to end the wait.
      name: name of the waiting process in these lines, if it is no task of the cluster.

    Raises:
      TimeoutError: tasks are still missing. The message names them and the reasons.
    """
    _complete(_Search(cluster, tasks), timeout_secs, every_secs, write or _log.say, check, name)


def _complete(
    search: _Search,
    timeout_secs: float,
    every_secs: float,
    write: Callable[[str], object],
    check: Callable[[], object],
    name: str | None = None,
) -> None:
    start = said = time.monotonic()
    with search:
        while not search.wait(min(_CHECK_SECS, every_secs, max(0.0, start + timeout_secs - time.monotonic()))):
            check()
            now, reasons = time.monotonic(), search.missing()
            missing = ", ".join(f"{task} at {search.cluster.address(task)} ({why})" for task, why in reasons.items())
            if now - start >= timeout_secs:
                raise TimeoutError(
                    f"{missing} not there after start_timeout_secs; start it, or correct its address in TF_CONFIG on "
                    f"every task. Received: start_timeout_secs={timeout_secs:g}"
                )
            if now - said >= every_secs:
                said = now
                waited = f"{now - start:.0f} s of {timeout_secs:g} s"
                write(f"tfdist {name or search.cluster.task}: waiting for {missing}; {waited}")


def hello(cluster: Cluster, *words: str) -> bytes:
    """Returns this task's line that names its cluster and itself, followed by `words`."""
    said = _MAGIC.decode(), digest_of(cluster.training_tasks), str(cluster.task), *words
    return f"{' '.join(said)}\n".encode()


def answering(cluster: Cluster, secret: bytes, on_met: Callable[[str], None]) -> _sockets.LineServer:
    """Returns a server on this task's port that identifies the task to callers."""
    with _naming_address(cluster):
        return _sockets.LineServer(_listener(cluster), lambda peer: converse(cluster, secret, on_met))


def converse(cluster: Cluster, secret: bytes, on_met: Callable[[str], None]) -> _sockets.Conversation:
    """Identifies this task to a caller; `on_met` is called with the name of a task that has proved its own."""
    mine, nonce = str(cluster.task), secrets.token_hex(_NONCE_BYTES)
    words = (yield hello(cluster, nonce)).decode(errors="replace").split()
    if len(words) != 5 or words[:2] != [_MAGIC.decode(), digest_of(cluster.training_tasks)]:
        return
    task, asked, proof = words[2:]
    if not _sockets.is_proof(proof, secret, _PROTOCOL, "caller", task, mine, nonce, asked):
        yield REFUSED
        return
    answer = _sockets.proof(secret, _PROTOCOL, "answering", task, mine, nonce, asked).hex()
    if (yield f"{_MAGIC.decode()} {answer}\n".encode()) + b"\n" == MET:
        on_met(task)
        yield MET


def _listener(cluster: Cluster) -> socket.socket:
    return _sockets.listen(_sockets.split_address(cluster.address())[1])


@contextlib.contextmanager
def naming_port(cluster: Cluster | None) -> Iterator[None]:
    """Turns TensorFlow's "Could not start gRPC server" within this block into an OSError that names the port in use."""
    try:
        yield
    except Exception as error:
        if "Could not start gRPC server" in str(error) and cluster is not None and cluster.task in cluster.tasks:
            with _naming_address(cluster):
                _listener(cluster).close()
        raise


@contextlib.contextmanager
def _naming_address(cluster: Cluster) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{cluster.task} can't listen on its port ({os.strerror(error.errno or 0)}); end what uses it, or give the "
            f"task another port in TF_CONFIG on every task. Received: {cluster.address()}",
        ) from None


class _Search:
    """Calls each of the other tasks until it answers; one thread per task, because a name may take long to resolve."""

    def __init__(self, cluster: Cluster, others: Iterable[Task], secret: bytes = b"", mutual: bool = False) -> None:
        self.cluster = cluster
        self._secret = secret
        self._reasons = dict.fromkeys(others, "no answer yet")
        # Tasks that have not called this task yet; empty unless calls must be mutual.
        self._not_asked = set(self._reasons) if mutual else set()
        self._changed = threading.Condition()
        self._stop = threading.Event()

    def __enter__(self) -> _Search:
        for task in list(self._reasons):  # a copy, because the threads remove the tasks that they reach
            threading.Thread(target=self._ask_until_met, args=(task,), name=f"tfdist-meet-{task}", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def wait(self, timeout_secs: float) -> bool:
        """Waits until all tasks have been reached; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reasons and not self._not_asked, timeout_secs)

    def missing(self) -> dict[Task, str]:
        """Returns the tasks that have not been reached, each with the reason."""
        with self._changed:
            missing = dict.fromkeys(self._not_asked, "it can't reach this task yet") | self._reasons
            return dict(sorted(missing.items()))

    def was_asked_by(self, name: str) -> None:
        """Notes that the task of this name has reached this one."""
        with self._changed:
            self._not_asked = {task for task in self._not_asked if str(task) != name}
            self._changed.notify_all()

    def _ask_until_met(self, task: Task) -> None:
        has_proved = False
        while not self._stop.is_set():
            reason = ask(self.cluster, task, self._secret)
            has_proved = has_proved or reason == _PROVED
            if reason == _SERVING and self._secret and not has_proved:
                reason = "something serves there that has not proved to belong to this job; start all tasks again"
            with self._changed:
                if reason in (None, _SERVING):
                    self._reasons.pop(task, None)
                    if reason == _SERVING:
                        self._not_asked.discard(task)
                    self._changed.notify_all()
                    return
                self._reasons[task] = reason
            self._stop.wait(_RETRY_SECS)


def ask(cluster: Cluster, task: Task, secret: bytes = b"") -> str | None:
    """Calls a task once.

    Returns:
      None if both tasks have identified themselves; `_PROVED` if the task has, but its last answer is missing;
      `_SERVING` if TensorFlow's server answers; else the reason why the task counts as missing.
    """
    host, port = _sockets.split_address(cluster.address(task))
    proved = False
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECS) as connection:
            answer = _read_line(connection)
            reason = judge(answer, cluster, task)
            if reason is not None:
                return reason
            proved = _prove(connection, cluster, task, secret, answer.decode(errors="replace").split()[3])
            if proved:
                connection.sendall(MET)
                return None if _read_line(connection) == MET else _PROVED
            return _UNPROVED
    except socket.gaierror as error:
        return f"its name can't be resolved: {error.strerror}"
    except TimeoutError:
        return _PROVED if proved else "does not answer"
    except UnicodeError:
        return "its name can't be resolved: it is no host name"
    except OSError as error:
        return _PROVED if proved else (error.strerror or str(error)).lower()


def _prove(connection: socket.socket, cluster: Cluster, task: Task, secret: bytes, nonce: str) -> bool:
    """Proves this task's identity; returns True if the other task has proved its own."""
    mine, own = str(cluster.task), secrets.token_hex(_NONCE_BYTES)
    claim = _sockets.proof(secret, _PROTOCOL, "caller", mine, str(task), nonce, own)
    connection.sendall(hello(cluster, own, claim.hex()))
    words = _read_line(connection).decode(errors="replace").split()
    return (
        len(words) == 2
        and words[0] == _MAGIC.decode()
        and _sockets.is_proof(words[1], secret, _PROTOCOL, "answering", mine, str(task), nonce, own)
    )


def _read_line(connection: socket.socket) -> bytes:
    """Reads a line of the protocol, or the first bytes of anything else."""
    return _sockets.read_line(connection, _PROBE_SECS, _MAGIC)


def judge(answer: bytes, cluster: Cluster, task: Task) -> str | None:
    """Returns the reason why an answer is not from `task` of this cluster; None if it is."""
    if not answer:
        return "closed the connection"
    if not answer.startswith(_MAGIC):
        return _SERVING
    words = answer.decode(errors="replace").split()
    if len(words) != 4 or words[1] != digest_of(cluster.training_tasks):
        return "belongs to a cluster of other tasks: its TF_CONFIG differs"
    return None if words[2] == str(task) else f"the task there says that it is {words[2][:40]!r}"
