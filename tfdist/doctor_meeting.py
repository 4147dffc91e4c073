# SPDX-License-Identifier: Apache-2.0
"""The tasks of a cluster ask each other who they are: whether each reaches each, with which versions and clocks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist import _addresses
from tfdist.cluster import Cluster, Task

_MAX_SKEW_SECS = 1.0
_RETRY_SECS = 0.2
_ANSWER_SECS = 5.0
_MAX_LINE = 1 << 16


def meet(cluster: Cluster, mine: Mapping[str, str], timeout_secs: float) -> list[tuple[str, str]]:
    """Answers the other tasks, and asks each of them.

    Args:
      cluster: all tasks, with this one.
      mine: versions by name.
      timeout_secs: how long to wait for the others.

    Returns:
      States ("ok", "warning", "wrong") with what they are of.
    """
    others = [task for task in cluster.tasks if task != cluster.task]
    if not others or cluster.task not in cluster.tasks:
        return []
    deadline = time.monotonic() + timeout_secs
    try:
        desk = _Desk(cluster, mine)
    except OSError as error:
        return [("wrong", f"{cluster.task} can't listen at {cluster.address()}: {error}; end what holds the port")]
    with desk, concurrent.futures.ThreadPoolExecutor(min(64, len(others)), "tfdist meet") as pool:
        answers = list(pool.map(lambda task: _ask(cluster, task, deadline), others))
        # The others need answers too, and this may be the first to have all of its own.
        desk.wait_for(set(map(str, others)), max(0.0, deadline - time.monotonic()))
    found: list[tuple[str, str]] = []
    for task, answer in zip(others, answers, strict=True):
        found += _compare(task, cluster.address(task), answer, mine)
    return found


def _compare(task: Task, address: str, answer: dict[str, Any] | str, mine: Mapping[str, str]) -> list[tuple[str, str]]:
    if isinstance(answer, str):
        return [("wrong", f"{task} at {address}: {answer}; does it run, and is no firewall between?")]
    if answer.get("task") != str(task):
        return [
            ("wrong", f"{task} at {address}: {answer.get('task')!r} answers there; give all tasks the same TF_CONFIG")
        ]
    found = [("ok", f"{task} at {address} answers")]
    theirs = answer.get("versions", {})
    for name, version in mine.items():
        if theirs.get(name) != version:
            there = theirs.get(name, "none")
            found.append(("wrong", f"{task} has {name} {there} where {version} is here; install the same on all"))
    if abs(answer["skew"]) > _MAX_SKEW_SECS:
        found.append(("warning", f"the clock of {task} is {answer['skew']:+.1f} s off from this one; synchronise them"))
    return found


class _Desk:
    """Answers whoever asks at this task's port.

    Raises:
      OSError: the port is taken.
    """

    def __init__(self, cluster: Cluster, mine: Mapping[str, str]) -> None:
        self._answer = {"task": str(cluster.task), "versions": dict(mine)}
        self._asked: set[str] = set()
        self._changed = threading.Condition()
        port = _addresses.split(cluster.address())[1]
        # On all interfaces, as TensorFlow's server will be.
        self._server = socket.create_server(("", port), backlog=128)
        self._thread = threading.Thread(target=self._serve, name="tfdist desk", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # Closed.
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(_ANSWER_SECS)
                asking = json.loads(_read_line(connection))
                answer = json.dumps({**self._answer, "time": time.time()})
                connection.sendall(f"{answer}\n".encode())
                with self._changed:
                    self._asked.add(str(asking))
                    self._changed.notify_all()

    def wait_for(self, tasks: set[str], timeout_secs: float) -> None:
        """Waits until all of these have asked."""
        with self._changed:
            self._changed.wait_for(lambda: tasks <= self._asked, timeout_secs)

    def __enter__(self) -> _Desk:
        return self

    def __exit__(self, *exception: object) -> None:
        # Only this wakes a thread that is in accept().
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(_ANSWER_SECS)


def _ask(cluster: Cluster, task: Task, deadline: float) -> dict[str, Any] | str:
    """What a task answers, with `skew`, how far its clock is ahead in seconds; or why it does not."""
    address = _addresses.split(cluster.address(task))
    while True:
        try:
            with socket.create_connection(
                address, min(_ANSWER_SECS, max(0.1, deadline - time.monotonic()))
            ) as connection:
                started = time.time()
                connection.sendall(f"{json.dumps(str(cluster.task))}\n".encode())
                answer = json.loads(_read_line(connection))
                middle, half = (started + time.time()) / 2, (time.time() - started) / 2
                skew = float(answer["time"]) - middle
                return {**answer, "skew": skew if abs(skew) > half else 0.0}
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() >= deadline:
                return str(error) or type(error).__name__
        time.sleep(min(_RETRY_SECS, max(0.0, deadline - time.monotonic())))


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        data = connection.recv(4096)
        if not data:
            break
        line += data
    return line
