# SPDX-License-Identifier: Apache-2.0
"""Waits until all tasks of a cluster are there, before TensorFlow is started: no TensorFlow import.

TensorFlow's own start blocks without a word, and can be neither interrupted nor watched from a thread, because it holds
Python's lock. So each task first listens on its own address, answers who it is, and asks all others. A task that has
met all others, and was met by them, goes on and starts TensorFlow's server on the same port.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable

from tfdist.cluster import Cluster, Task
from tfdist.engines import watch

_MAGIC = b"tfdist"
# The answer of TensorFlow's server: that task has met all others already.
_SERVING = "serving"
_PROBE_SECS = 2.0
_RETRY_SECS = 0.2
_CHECK_SECS = 0.5


def meet(
    cluster: Cluster,
    timeout_secs: float,
    *,
    every_secs: float = 10.0,
    write: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when all training tasks have been reached at their addresses.

    Args:
      cluster: the tasks, and which one this is.
      timeout_secs: how long to wait.
      every_secs: how often to write who is missing.
      write: takes such a line; standard error by default.
      clock: the time in seconds.

    Raises:
      TimeoutError: somebody is missing still; names them, and why.
      OSError: this task can't listen on its own port.
    """
    others = [task for task in cluster.training_tasks if task != cluster.task]
    search = _Search(cluster, others, mutual=True)
    with _Answering(cluster, search.was_asked_by):
        _complete(search, timeout_secs, every_secs, write or watch.say, clock, lambda: None)


def reach(
    cluster: Cluster,
    tasks: Iterable[Task],
    timeout_secs: float,
    *,
    every_secs: float = 10.0,
    write: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    check: Callable[[], object] = lambda: None,
    name: str | None = None,
) -> None:
    """Returns when all of `tasks` have been reached at their addresses.

    Args:
      cluster: the tasks, and which one this is.
      tasks: those to reach.
      timeout_secs: how long to wait.
      every_secs: how often to write who is missing.
      write: takes such a line; standard error by default.
      clock: the time in seconds.
      check: called now and then; raises if there is no point in waiting on.
      name: who is waiting, where that is no task of the cluster.

    Raises:
      TimeoutError: somebody is missing still; names them, and why.
    """
    _complete(_Search(cluster, tasks), timeout_secs, every_secs, write or watch.say, clock, check, name)


def _complete(
    search: _Search,
    timeout_secs: float,
    every_secs: float,
    write: Callable[[str], object],
    clock: Callable[[], float],
    check: Callable[[], object],
    name: str | None = None,
) -> None:
    start = said = clock()
    with search:
        while not search.wait(min(_CHECK_SECS, every_secs, max(0.0, start + timeout_secs - clock()))):
            check()
            now, missing = clock(), _missing(search.cluster, search.missing())
            if now - start >= timeout_secs:
                raise TimeoutError(
                    f"{missing} not there after start_timeout_secs; start it, or correct its address in TF_CONFIG on "
                    f"every task. Received: start_timeout_secs={timeout_secs:g}"
                )
            if now - said >= every_secs:
                said = now
                waited = f"{now - start:.0f} s of {timeout_secs:g} s"
                write(f"tfdist {name or search.cluster.task}: waiting for {missing}; {waited}")


def _missing(cluster: Cluster, reasons: dict[Task, str]) -> str:
    return ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in reasons.items())


def _digest(cluster: Cluster) -> str:
    # Only what all tasks must agree on: addresses may be written differently on each machine.
    tasks = json.dumps([str(task) for task in cluster.training_tasks])
    return hashlib.sha256(tasks.encode()).hexdigest()[:16]


def _hello(cluster: Cluster) -> bytes:
    return b" ".join([_MAGIC, _digest(cluster).encode(), str(cluster.task).encode()]) + b"\n"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[IPv6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def answers(address: str, timeout_secs: float) -> bool:
    """Whether connections to "host:port" are accepted."""
    try:
        socket.create_connection(split_address(address), timeout=timeout_secs).close()
    except OSError:
        return False
    return True


class _Answering:
    """Listens on this task's port and tells everybody who it is."""

    def __init__(self, cluster: Cluster, on_asked: Callable[[str], None]) -> None:
        self._hello = _hello(cluster)
        self._on_asked = on_asked
        self._socket = _listen(cluster)

    def __enter__(self) -> None:
        threading.Thread(target=self._answer, name="tfdist-rendezvous", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        # Wakes the thread that accepts, which close alone would leave waiting.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PROBE_SECS)
                connection.sendall(self._hello)
                # The caller closes first, so that this port is left in no state that a server could not bind.
                words = connection.recv(256).decode(errors="replace").split()
                if words[:2] == self._hello.decode().split()[:2]:
                    self._on_asked(words[-1])


def _listen(cluster: Cluster) -> socket.socket:
    _, port = split_address(cluster.address())
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{cluster.task} can't listen on its port ({error.strerror}); end what uses it, or give the task another "
            f"port in TF_CONFIG on every task. Received: {cluster.address()}",
        ) from None


class _Search:
    """Asks each of the others until it answers, each in a thread: a name may take long to resolve."""

    def __init__(self, cluster: Cluster, others: Iterable[Task], mutual: bool = False) -> None:
        self.cluster = cluster
        self._reasons = dict.fromkeys(others, "no answer yet")
        # Who has yet to meet this task, where that matters.
        self._not_asked = set(self._reasons) if mutual else set()
        self._changed = threading.Condition()
        self._stop = threading.Event()

    def __enter__(self) -> _Search:
        for task in list(self._reasons):  # the threads take out of it whom they meet
            threading.Thread(target=self._ask_until_met, args=(task,), name=f"tfdist-meet-{task}", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def wait(self, timeout_secs: float) -> bool:
        """Whether everybody has been met by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reasons and not self._not_asked, timeout_secs)

    def missing(self) -> dict[Task, str]:
        """Who has not been met, and why not."""
        with self._changed:
            missing = dict.fromkeys(self._not_asked, "it can't reach this task yet") | self._reasons
            return dict(sorted(missing.items()))

    def was_asked_by(self, name: str) -> None:
        """Notes that the task of this name has met this one."""
        with self._changed:
            self._not_asked = {task for task in self._not_asked if str(task) != name}
            self._changed.notify_all()

    def _ask_until_met(self, task: Task) -> None:
        while not self._stop.is_set():
            reason = _ask(self.cluster, task)
            with self._changed:
                if reason in (None, _SERVING):
                    self._reasons.pop(task, None)
                    if reason == _SERVING:
                        self._not_asked.discard(task)
                    self._changed.notify_all()
                    return
                self._reasons[task] = reason
            self._stop.wait(_RETRY_SECS)


def _ask(cluster: Cluster, task: Task) -> str | None:
    """Why this task can't be said to be there; None or `_SERVING` if it is."""
    host, port = split_address(cluster.address(task))
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECS) as connection:
            answer = connection.recv(256)
            if answer.startswith(_MAGIC):
                connection.sendall(_hello(cluster))
    except socket.gaierror as error:
        return f"its name can't be resolved: {error.strerror}"
    except TimeoutError:
        return "does not answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return _judge(answer, cluster, task)


def _judge(answer: bytes, cluster: Cluster, task: Task) -> str | None:
    if not answer:
        return "closed the connection"
    if not answer.startswith(_MAGIC):
        return _SERVING
    words = answer.decode(errors="replace").split()
    if len(words) != 3 or words[1] != _digest(cluster):
        return "belongs to a cluster of other tasks: its TF_CONFIG differs"
    return None if words[2] == str(task) else f"the task there says that it is {words[2]}"
