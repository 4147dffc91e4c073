# SPDX-License-Identifier: Apache-2.0
"""Mutual check of all tasks of a cluster: each task reaches each other one, with the same versions and clocks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist import _addresses, _line_server, _sockets
from tfdist.cluster import Cluster, Task

_MAX_SKEW_SECS = 1.0
_RETRY_SECS = 0.2
_ANSWER_SECS = 5.0
# A task that has answered connects at the same time, unless this task's name resolves to another address there.
_CALL_BACK_SECS = 2.0
_VERSION = re.compile(r"[\w.+-]{1,40}", re.ASCII)
# Longest text of another task that is printed.
_MAX_PRINTED = 80


def meet(cluster: Cluster, mine: Mapping[str, str], timeout_secs: float) -> list[tuple[str, str]]:
    """Calls each of the other tasks, answers their calls, and compares versions and clocks.

    Args:
      cluster: all tasks, with this one.
      mine: this task's versions by name.
      timeout_secs: how long to wait for the others.

    Returns:
      Pairs of a state ("ok", "warning", "wrong") and a line of text.
    """
    others = [task for task in cluster.tasks if task != cluster.task]
    if not others or cluster.task not in cluster.tasks:
        return []
    deadline = time.monotonic() + timeout_secs
    callers = Callers(cluster, mine)
    try:
        listening = _line_server.listen(cluster.address(), map(cluster.address, others))
    except OSError as error:
        return [("wrong", f"{cluster.task} can't listen at {cluster.address()}: {error}; end what holds the port")]
    asking = concurrent.futures.ThreadPoolExecutor(min(64, len(others)), "tfdist meet")
    with _line_server.LineServer(listening, callers.converse) as answering, asking as pool:

        def ask(task: Task) -> dict[str, Any] | str:
            answer = ask_task(cluster, task, deadline)
            if isinstance(answer, dict) and not callers.wait_for(task, _CALL_BACK_SECS):
                answering.listen_everywhere()
            return answer

        answers = list(pool.map(ask, others))
        # The others need answers, too, and this task may be the first that has all of its own.
        callers.wait_for_all(max(0.0, deadline - time.monotonic()))
    found: list[tuple[str, str]] = []
    for task, answer in zip(others, answers, strict=True):
        found += compare(task, cluster.address(task), answer, mine)
    return found


def compare(task: Task, address: str, answer: dict[str, Any] | str, mine: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns findings, (severity, text), about another task's answer, or about the reason why there is none."""
    if isinstance(answer, str):
        return [("wrong", f"{task} at {address}: {answer}; does it run, and is no firewall between?")]
    if answer.get("task") != str(task):
        other = _printable(answer.get("task"))
        return [("wrong", f"{task} at {address}: {other} answers there; give all tasks the same TF_CONFIG")]
    found = [("ok", f"{task} at {address} answers")]
    theirs = answer.get("versions", {})
    for name, version in mine.items():
        if theirs.get(name) != version:
            there = theirs.get(name, "none")
            there = there if isinstance(there, str) and _VERSION.fullmatch(there) else _printable(there)
            found.append(("wrong", f"{task} has {name} {there} where {version} is here; install the same on all"))
    if abs(answer["skew"]) > _MAX_SKEW_SECS:
        found.append(("warning", f"the clock of {task} is {answer['skew']:+.1f} s off from this one; synchronise them"))
    return found


def _printable(value: object) -> str:
    """Returns a peer's text without control characters and of limited length, for the terminal."""
    return ascii(value)[:_MAX_PRINTED]


class Callers:
    """Answers the tasks that connect to this task's port, and records which tasks have connected."""

    def __init__(self, cluster: Cluster, mine: Mapping[str, str]) -> None:
        self._answer = {"task": str(cluster.task), "versions": dict(mine)}
        # Keyed by the bytes that a task sends, so that no data of an unknown peer are parsed or stored.
        self._not_asked = {_name(task): str(task) for task in cluster.tasks if task != cluster.task}
        self._changed = threading.Condition()

    def converse(self) -> _line_server.Conversation:
        """Answers one caller; see `_line_server.LineServer`."""
        asking = yield b""
        answer = json.dumps({**self._answer, "time": time.time()})
        yield f"{answer}\n".encode()
        with self._changed:
            self._not_asked.pop(asking, None)
            self._changed.notify_all()

    def wait_for(self, task: Task, timeout_secs: float) -> bool:
        """Waits until a task has connected; returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: _name(task) not in self._not_asked, timeout_secs)

    def wait_for_all(self, timeout_secs: float) -> None:
        """Waits until all tasks have connected, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: not self._not_asked, timeout_secs)


def _name(task: Task) -> bytes:
    return json.dumps(str(task)).encode()


def ask_task(cluster: Cluster, task: Task, deadline: float) -> dict[str, Any] | str:
    """Calls a task until it answers.

    Returns:
      Its answer, with `skew`, the seconds by which its clock is ahead; or the reason why there is none.
    """
    address = _addresses.split(cluster.address(task))
    while True:
        try:
            with socket.create_connection(
                address, min(_ANSWER_SECS, max(0.1, deadline - time.monotonic()))
            ) as connection:
                started = time.time()
                connection.sendall(_name(cluster.task) + b"\n")
                answer = parse(_sockets.read_line(connection, _ANSWER_SECS))
                with contextlib.suppress(OSError):
                    connection.sendall(b"\n")  # Acknowledges the answer.
                middle, half = (started + time.time()) / 2, (time.time() - started) / 2
                skew = float(answer["time"]) - middle
                return {**answer, "skew": skew if abs(skew) > half else 0.0}
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            if time.monotonic() >= deadline:
                return str(error)[:_MAX_PRINTED] or type(error).__name__
        time.sleep(min(_RETRY_SECS, max(0.0, deadline - time.monotonic())))


def parse(line: bytes) -> dict[str, Any]:
    """Parses an answer.

    Raises:
      ValueError: the line is no answer of `tfdist doctor`.
    """
    try:
        answer = json.loads(line)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("versions", {}), dict):
        raise ValueError("the answer is not from tfdist doctor")
    return answer
