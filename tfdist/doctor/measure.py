# SPDX-License-Identifier: Apache-2.0
"""Measures bandwidth and latency between the tasks of a cluster, bounded in time and bytes. No TensorFlow import.

The tasks take turns in the order of the cluster, so that no two links are measured at a time:

    first task   measures its links to the others, then passes the turn, with what was measured, to the next one
    ...
    last task    passes all results to all

    measuring -> answering   measure NAME DIGEST ping        then single bytes, which come back
    measuring -> answering   measure NAME DIGEST sink        then bytes until the connection is half closed
                 answering -> measuring   {"bytes": ..., "secs": ...}, of what came after the first quarter
    any -> next              measure NAME DIGEST turn|done   then a line of JSON: the links so far

A task answers to tasks of its own cluster only: DIGEST is of all addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import _files, _log, _sockets
from tfdist.cluster import Cluster, Task, digest_of

FORMAT, VERSION = "tfdist network", 1
_PINGS = 30
_CHUNK = bytes(2**16)
_MAX_LINE = 2**22
_CONNECT_SECS = 5.0
# A bucket of tokens lets the first bytes of a shaped link through at once, and TCP begins slowly.
_SKIPPED = 0.25
# Peers of each task: further ones repeat what is known, and n tasks have n (n - 1) links.
_MOST_PEERS = 8


@dataclasses.dataclass(frozen=True)
class MeasuredLink:
    """Bandwidth and latency from one task to another, in one direction."""

    source: str
    target: str
    bytes_per_sec: float
    latency_secs: float


def peers(tasks: Sequence[Task], task: Task) -> list[Task]:
    """Returns the tasks to which `task` measures: all others; in a large cluster, those at distances of powers of 2."""
    own, count = tasks.index(task), len(tasks)
    distances = (
        range(1, count) if count <= _MOST_PEERS + 1 else [2**power for power in range(math.ceil(math.log2(count)))]
    )
    return [tasks[(own + distance) % count] for distance in distances]


def measure(cluster: Cluster, timeout_secs: float, link_secs: float, link_bytes: int) -> list[MeasuredLink]:
    """Measures, with all other tasks, which call this at the same time.

    Args:
      cluster: all tasks, with this one.
      timeout_secs: longest time for all of it.
      link_secs: longest time for the bandwidth of a link.
      link_bytes: most bytes over a link.

    Returns:
      The links of all tasks, the same list on each.

    Raises:
      TimeoutError: another task did not take its turn in time; the message names the first one that is missing.
      OSError: this task can't listen at its address.
    """
    if cluster.task not in cluster.tasks or len(cluster.tasks) < 2:
        return []
    deadline = time.monotonic() + timeout_secs
    others = [cluster.address(task) for task in cluster.tasks if task != cluster.task]
    with _Answering(cluster, _sockets.listen(cluster.address(), others), deadline) as answering:
        return _take_turns(cluster, answering, deadline, link_secs, link_bytes)


def _take_turns(
    cluster: Cluster, answering: _Answering, deadline: float, link_secs: float, link_bytes: int
) -> list[MeasuredLink]:
    tasks = list(cluster.tasks)
    own = tasks.index(cluster.task)
    links = answering.wait_for("turn", deadline, tasks[own - 1]) if own else []
    for peer in peers(tasks, cluster.task):
        latency = _latency(cluster, peer, deadline)
        speed = _speed(cluster, peer, deadline, link_secs, link_bytes)
        links.append(MeasuredLink(str(cluster.task), str(peer), speed, latency))
    if own + 1 < len(tasks):
        _pass(cluster, tasks[own + 1], "turn", links, deadline)
        return answering.wait_for("done", deadline, tasks[-1])
    for task in tasks[:-1]:
        _pass(cluster, task, "done", links, deadline)
    return links


def measure_as_task(
    env: Mapping[str, str], timeout_secs: float, link_secs: float, link_bytes: int, output: str | None = None
) -> int:
    """Measures as a task of the cluster in TF_CONFIG, and prints this task's links; see `measure`.

    Args:
      env: the environment.
      timeout_secs: longest time for all of it.
      link_secs: longest time for the bandwidth of a link.
      link_bytes: most bytes over a link.
      output: file into which the first task writes all links.

    Returns:
      The exit code: 1 if something could not be measured.
    """
    try:
        cluster = Cluster.from_tf_config(env.get("TF_CONFIG"))
        links = measure(cluster, timeout_secs, link_secs, link_bytes)
        is_first = bool(links) and cluster.task == cluster.tasks[0]
        if is_first and output:
            hosts = {_sockets.address_key(cluster.address(task))[0] for task in cluster.tasks}
            _files.write(output, to_json(links, is_one_machine=len(hosts) == 1))
    except (ValueError, OSError) as error:  # TimeoutError is an OSError.
        _log.say(str(error))
        return 1
    if not links:
        _log.say(f"there is no link to measure: {cluster.task} has no other task")
        return 1
    for link in links:
        if link.source == str(cluster.task):
            speed, latency = link.bytes_per_sec / 0.125e9, 1e6 * link.latency_secs
            sys.stdout.write(f"{link.source} to {link.target}: {speed:.3g} Gbit/s, {latency:.0f} us\n")
    sys.stdout.write(f"{summary(links)}\n" if is_first else "")
    sys.stdout.flush()
    return 0


def to_json(links: Sequence[MeasuredLink], is_one_machine: bool = False) -> str:
    """Returns the content of a file that `from_json` reads."""
    each = [dataclasses.asdict(link) for link in links]
    content = {"format": FORMAT, "version": VERSION, "one_machine": is_one_machine, "links": each}
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str, name: str) -> tuple[list[MeasuredLink], bool]:
    """Parses what `to_json` has returned.

    Returns:
      The links, and True if all tasks run on one machine.

    Raises:
      ValueError: it is of another format or version, or has no links. The message is one line.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error}); write it with tfdist doctor --measure --json={name}") from None
    if not isinstance(given, dict) or given.get("format") != FORMAT or given.get("version") != VERSION:
        raise ValueError(
            f"{name} is no {FORMAT} of version {VERSION}; write it with tfdist doctor --measure --json={name}"
        )
    links = _links(given.get("links"))
    if not links:
        raise ValueError(f"{name}: links must be a list of measured links. Received: {str(given.get('links'))[:80]}")
    return links, given.get("one_machine") is True


def _links(given: Any) -> list[MeasuredLink]:
    """Returns the valid links; [] if one is invalid."""
    found = []
    for each in given if isinstance(given, list) else ():
        try:
            link = MeasuredLink(
                str(each["source"]), str(each["target"]), float(each["bytes_per_sec"]), float(each["latency_secs"])
            )
        except (TypeError, KeyError, ValueError):
            return []
        if not (0 < link.bytes_per_sec < math.inf and 0 <= link.latency_secs < math.inf):
            return []
        found.append(link)
    return found


def summary(links: Sequence[MeasuredLink]) -> str:
    """Returns one line: the slowest and the median link."""
    speeds = sorted(link.bytes_per_sec for link in links)
    latency = statistics.median(link.latency_secs for link in links)
    slowest = min(links, key=lambda link: link.bytes_per_sec)
    middle = speeds[len(speeds) // 2] / 0.125e9
    return (
        f"{len(links)} links: {middle:.3g} Gbit/s and {1e6 * latency:.0f} us in the middle, "
        f"the slowest is {slowest.source} to {slowest.target} with {slowest.bytes_per_sec / 0.125e9:.3g} Gbit/s"
    )


@contextlib.contextmanager
def _connected(cluster: Cluster, task: Task, kind: str, deadline: float) -> Any:
    address = _sockets.split_address(cluster.address(task))
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{task} at {cluster.address(task)} does not answer; does it run tfdist doctor --measure?"
            )
        try:
            connection = socket.create_connection(address, min(_CONNECT_SECS, left))
            break
        except OSError:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sendall(f"measure {cluster.task} {digest_of(cluster.tasks)} {kind}\n".encode())
        yield connection


def _latency(cluster: Cluster, task: Task, deadline: float) -> float:
    """Median of half the time of a round trip."""
    durations = []
    with _connected(cluster, task, "ping", deadline) as connection:
        for _ in range(_PINGS):
            before = time.perf_counter()
            connection.sendall(b".")
            if connection.recv(1) != b".":
                raise TimeoutError(f"{task} closed the connection; see its own output")
            durations.append(time.perf_counter() - before)
    return statistics.median(durations) / 2


def _speed(cluster: Cluster, task: Task, deadline: float, link_secs: float, link_bytes: int) -> float:
    with _connected(cluster, task, "sink", deadline) as connection:
        end, sent = time.monotonic() + link_secs, 0
        connection.sendall(f"{link_secs:.3f} {link_bytes}\n".encode())
        while sent < link_bytes and time.monotonic() < end:
            connection.sendall(_CHUNK)
            sent += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = json.loads(_sockets.read_line(connection, max(0.1, deadline - time.monotonic())) or b"{}")
    try:
        return float(answer["bytes"]) / float(answer["secs"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise TimeoutError(f"{task} did not say how many bytes have arrived; see its own output") from None


def _pass(cluster: Cluster, task: Task, kind: str, links: Sequence[MeasuredLink], deadline: float) -> None:
    with _connected(cluster, task, kind, deadline) as connection:
        connection.sendall(json.dumps([dataclasses.asdict(link) for link in links]).encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        # Closed by the other side once it has read all.
        connection.recv(1)


class _Answering:
    """Answers other tasks, a thread for each connection; they take turns, so there are few."""

    def __init__(self, cluster: Cluster, listening: Sequence[socket.socket], deadline: float) -> None:
        self._cluster = cluster
        self._listening = list(listening)
        self._deadline = deadline
        self._changed = threading.Condition()
        self._passed: dict[str, list[MeasuredLink]] = {}
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, args=(each,), daemon=True) for each in self._listening]

    def __enter__(self) -> _Answering:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True
        for each in self._listening:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(_CONNECT_SECS)

    def wait_for(self, kind: str, deadline: float, task: Task) -> list[MeasuredLink]:
        """Waits for the turn, or for the end, from another task."""
        with self._changed:
            if not self._changed.wait_for(lambda: kind in self._passed, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"waited for {task}, which has not passed on its {kind}; raise --measure_secs")
            return list(self._passed[kind])

    def _accept(self, listening: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_CONNECT_SECS)
            stream = connection.makefile("rb")
            words = stream.readline(_sockets.LINE_BYTES).decode(errors="replace").split()
            if len(words) != 4 or words[0] != "measure" or words[2] != digest_of(self._cluster.tasks):
                return
            connection.settimeout(max(0.1, self._deadline - time.monotonic()))
            {"ping": self._ping, "sink": self._sink}.get(words[3], self._pass_links)(connection, stream, words[3])

    def _ping(self, connection: socket.socket, stream: Any, kind: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            connection.sendall(stream.read(1))

    def _sink(self, connection: socket.socket, stream: Any, kind: str) -> None:
        secs, most = stream.readline(_sockets.LINE_BYTES).split()
        skipped_bytes, skipped_secs = _SKIPPED * int(most), _SKIPPED * float(secs)
        received = counted = 0
        started, since = time.perf_counter(), 0.0
        buffer = bytearray(2**18)
        last = started
        while count := stream.readinto1(buffer):
            last = time.perf_counter()
            received += count
            if since:
                counted += count
            elif received >= skipped_bytes or last - started >= skipped_secs:
                since = last
            if received > int(most) + len(_CHUNK):
                return
        # A short transfer counts whole.
        whole = {"bytes": received, "secs": last - started}
        part = {"bytes": counted, "secs": last - since}
        connection.sendall(json.dumps(part if counted and last > since else whole).encode() + b"\n")

    def _pass_links(self, connection: socket.socket, stream: Any, kind: str) -> None:
        if kind in ("turn", "done"):
            links = _links(json.loads(stream.readline(_MAX_LINE)))
            with self._changed:
                self._passed[kind] = links
                self._changed.notify_all()
