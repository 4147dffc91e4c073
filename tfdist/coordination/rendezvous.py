# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: waits until all tasks of a cluster have started, before TensorFlow's server starts. No TensorFlow import.

TensorFlow's own start blocks silently, and can be neither interrupted nor watched from a thread, because it holds
Python's lock. So each task first listens at its own port, identifies itself to callers, and calls all others. A task
that has reached all others, and was reached by them, continues and starts TensorFlow's server on the same port.

After the introduction of `lines`, the caller says that it has met the answering task, which answers the same. These two
lines exist because the answering task may start its TensorFlow server at once. A task that starts late can't tell that
server from a foreign one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tfdist import _log, _sockets
from tfdist.cluster import Cluster, Task, digest_of
from tfdist.coordination import lines

MET = b"tfdist met\n"
# Result for a port at which TensorFlow's server answers: that task has met all others already.
_SERVING = "serving"
# Result for a task that has proved its identity, but whose last answer is missing.
_PROVED = "no answer to the end"
_PROBE_SECS = 2.0
_RETRY_SECS = 0.2
_CHECK_SECS = 0.5
# Interval of the lines that name the missing tasks.
_SAY_EVERY_SECS = 10.0


def meet(cluster: Cluster, timeout_secs: float, check: Callable[[], object] = lambda: None, secret: str = "") -> None:
    """Waits until all training tasks have reached each other at their addresses.

    Args:
      cluster: the tasks, and which one this is.
      timeout_secs: how long to wait.
      check: called at least twice a second; may raise to end the wait.
      secret: shared secret of the job; "" for none.

    Raises:
      TimeoutError: tasks are still missing. The message names them and the reasons.
      OSError: this task can't listen on its own port.
    """
    others = [task for task in cluster.training_tasks if task != cluster.task]
    search = _Search(cluster, others, secret.encode(), mutual=True)
    with answering(cluster, secret.encode(), search.was_asked_by):
        search.complete(timeout_secs, check, str(cluster.task))


def reach(cluster: Cluster, tasks: Iterable[Task], timeout_secs: float, check: Callable[[], object], name: str) -> None:
    """Waits until all of `tasks` answer at their addresses; the process that waits is called `name`. See `meet`."""
    _Search(cluster, tasks).complete(timeout_secs, check, name)


def answering(cluster: Cluster, secret: bytes, on_met: Callable[[str], None]) -> lines.LineServer:
    """Returns a server on this task's port that identifies the task to callers."""
    with _naming_address(cluster):
        return lines.LineServer(_listener(cluster), lambda peer: converse(cluster, secret, on_met))


def converse(cluster: Cluster, secret: bytes, on_met: Callable[[str], None]) -> lines.Conversation:
    """Identifies this task to a caller; `on_met` is called with the name of a task that has proved its own."""
    name, answer = yield from lines.identify(secret, digest_of(cluster.training_tasks), str(cluster.task))
    if (yield answer) + b"\n" == MET:
        on_met(name)
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
        self._cluster = cluster
        self._secret = secret
        self._reasons = dict.fromkeys(others, "no answer yet")
        # Tasks that have not called this task yet; empty unless calls must be mutual.
        self._not_asked = set(self._reasons) if mutual else set()
        self._changed = threading.Condition()
        self._stop = threading.Event()

    def complete(self, timeout_secs: float, check: Callable[[], object], name: str) -> None:
        """Waits until all tasks have been reached; see `meet`. `name` is that of the waiting process."""
        start = said = time.monotonic()
        for task in list(self._reasons):  # a copy, because the threads remove the tasks that they reach
            threading.Thread(target=self._ask_until_met, args=(task,), name=f"tfdist-meet-{task}", daemon=True).start()
        try:
            while not self.wait(min(_CHECK_SECS, _SAY_EVERY_SECS, max(0.0, start + timeout_secs - time.monotonic()))):
                check()
                now = time.monotonic()
                if now - start >= timeout_secs:
                    raise TimeoutError(
                        f"{self._missing()} not there after start_timeout_secs; start it, or correct its address in "
                        f"TF_CONFIG on every task. Received: start_timeout_secs={timeout_secs:g}"
                    )
                if now - said >= _SAY_EVERY_SECS:
                    said, waited = now, f"{now - start:.0f} s of {timeout_secs:g} s"
                    _log.say(f"{name}: waiting for {self._missing()}; {waited}")
        finally:
            self._stop.set()

    def wait(self, timeout_secs: float) -> bool:
        """Waits until all tasks have been reached; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reasons and not self._not_asked, timeout_secs)

    def _missing(self) -> str:
        with self._changed:
            missing = dict.fromkeys(self._not_asked, "it can't reach this task yet") | self._reasons
        return ", ".join(f"{task} at {self._cluster.address(task)} ({why})" for task, why in sorted(missing.items()))

    def was_asked_by(self, name: str) -> None:
        """Notes that the task of this name has reached this one."""
        with self._changed:
            self._not_asked = {task for task in self._not_asked if str(task) != name}
            self._changed.notify_all()

    def _ask_until_met(self, task: Task) -> None:
        has_proved = False
        while not self._stop.is_set():
            reason = ask(self._cluster, task, self._secret)
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
    reason = ""
    try:
        with lines.Connection(_sockets.split_address(cluster.address(task)), _PROBE_SECS) as connection:
            connection.introduce(secret, digest_of(cluster.training_tasks), str(cluster.task), str(task))
            reason = _PROVED
            connection.socket.sendall(MET)
            return None if connection.read_line() == MET else _PROVED
    except lines.ForeignError:
        return _SERVING
    except (lines.ProtocolError, EOFError) as error:
        return reason or str(error)
    except socket.gaierror as error:
        return f"its name can't be resolved: {error.strerror}"
    except TimeoutError:
        return reason or "does not answer"
    except UnicodeError:
        return "its name can't be resolved: it is no host name"
    except OSError as error:
        return reason or (error.strerror or str(error)).lower()
