# SPDX-License-Identifier: Apache-2.0
"""Tasks of a cluster that run `tfdist doctor --measure` at the same time measure the links between them.

No TensorFlow import. The tasks take turns in the order of the cluster, so that no two links are
measured at a time. The turn, with the links so far, goes round twice: in the first lap each task measures its links,
in the second each gets all of them.

    asking -> answering   DIGEST ping        then single bytes, which come back
    asking -> answering   DIGEST sink        then bytes until the connection is half closed; the answer is bytes per
                                             second, without the first quarter
    any -> next           DIGEST turn        then a line of JSON: the links so far

A task measures with tasks of its own cluster only: DIGEST is of all tasks. Another one gets the answer _OTHER.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import queue
import socket
import socketserver
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist import _checks, _files, _log, _sockets
from tfdist.cluster import Cluster, Task, digest_of

FORMAT, VERSION = "tfdist network", 1
_PINGS = 30
_CHUNK = bytes(2**16)
_OTHER = b"other TF_CONFIG\n"
_MAX_LINE = 2**22
_CONNECT_SECS = 5.0
# A bucket of tokens lets the first bytes of a shaped link through at once, and TCP begins slowly.
_SKIPPED = 0.25
# Peers of each task: further ones repeat what is known, and n tasks have n (n - 1) links.
_MOST_PEERS = 8
# Longest time for the bandwidth of one link, and most bytes.
_LINK_SECS, _LINK_BYTES = 1.0, 2**26


@dataclasses.dataclass(frozen=True)
class MeasuredLink:
    """Bandwidth and latency from one task to another, in one direction.

    Raises:
      ValueError: a number is invalid.
    """

    source: str
    target: str
    bytes_per_sec: float
    latency_secs: float

    def __post_init__(self) -> None:
        numbers = self.bytes_per_sec, self.latency_secs
        if not all(map(_checks.is_number, numbers)) or self.bytes_per_sec <= 0 or self.latency_secs < 0:
            raise ValueError(f"a link has a bandwidth above 0 and a latency. Received: {numbers}")


def peers(tasks: Sequence[Task], task: Task) -> list[Task]:
    """Returns the tasks to which `task` measures: all others; in a large cluster, those at distances of powers of 2."""
    own, count = tasks.index(task), len(tasks)
    powers = [2**power for power in range(math.ceil(math.log2(count)))]
    return [tasks[(own + distance) % count] for distance in (range(1, count) if count <= _MOST_PEERS + 1 else powers)]


def measure(cluster: Cluster, timeout_secs: float) -> list[MeasuredLink]:
    """Measures, with all other tasks, which call this at the same time.

    Args:
      cluster: all tasks, with this one.
      timeout_secs: longest time for all of it.

    Returns:
      The links of all tasks, the same list on each.

    Raises:
      TimeoutError: another task did not take its turn in time; the message names the first one that is missing.
      OSError: this task can't listen at its address.
    """
    if cluster.task not in cluster.tasks or len(cluster.tasks) < 2:
        return []
    tasks, deadline = list(cluster.tasks), time.monotonic() + timeout_secs
    own = tasks.index(cluster.task)
    with _answering(cluster, deadline) as state:

        def wait() -> list[MeasuredLink]:
            try:
                return state.turns.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = f"waited {timeout_secs:g} s for {tasks[own - 1]}, which has not measured"
                raise TimeoutError(f"{late}; if it runs, see its own line, or raise --measure_secs") from None

        links = wait() if own else []
        for peer in peers(tasks, cluster.task):
            latency = _latency(cluster, peer, deadline)
            speed = _speed(cluster, peer, deadline)
            links.append(MeasuredLink(str(cluster.task), str(peer), speed, latency))
        _pass(cluster, tasks[(own + 1) % len(tasks)], links, deadline)
        links = wait()
        if own + 1 < len(tasks):
            _pass(cluster, tasks[own + 1], links, deadline)
    return links


def measure_as_task(env: Mapping[str, str], timeout_secs: float, output: str | None = None) -> int:
    """Measures as a task of the cluster in TF_CONFIG, and prints this task's links; see `measure`.

    Args:
      env: the environment.
      timeout_secs: longest time for all of it.
      output: file into which the first task writes all links.

    Returns:
      The exit code: 1 if something could not be measured.
    """
    try:
        cluster = Cluster.from_tf_config(env.get("TF_CONFIG"))
        if output and cluster.task == cluster.tasks[0]:
            _files.check_writable(output, "--json")
        links = measure(cluster, timeout_secs)
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
    slowest = min(links, key=lambda link: link.bytes_per_sec)
    for link in links:
        if link.source == str(cluster.task):
            sys.stdout.write(f"{_text(link)}\n")
    sys.stdout.write(f"{len(links)} links, the slowest: {_text(slowest)}\n" if is_first else "")
    sys.stdout.flush()
    return 0


def _text(link: MeasuredLink) -> str:
    speed, latency = link.bytes_per_sec / 0.125e9, 1e6 * link.latency_secs
    return f"{link.source} to {link.target}: {speed:.3g} Gbit/s, {latency:.0f} us"


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
    again = f"write it with tfdist doctor --measure --json={name}"
    try:
        given = json.loads(text)
        if (given["format"], given["version"]) != (FORMAT, VERSION):
            raise ValueError(f"another format: {given['format']!r}, version {given['version']!r}")
        links = [MeasuredLink(**each) for each in given["links"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{name} is no {FORMAT} of version {VERSION} ({error}); {again}") from None
    if not links:
        raise ValueError(f"{name} has no links; {again}")
    return links, given.get("one_machine") is True


@contextlib.contextmanager
def _connected(cluster: Cluster, task: Task, kind: str, deadline: float) -> Iterator[socket.socket]:
    address = _sockets.split_address(cluster.address(task))
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            where = cluster.address(task)
            raise TimeoutError(f"{task} at {where} does not answer; does it run tfdist doctor, too?")
        try:
            connection = socket.create_connection(address, min(_CONNECT_SECS, left))
            break
        except OSError:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sendall(f"{digest_of(cluster.tasks)} {kind}\n".encode())
        yield connection


def _latency(cluster: Cluster, task: Task, deadline: float) -> float:
    """Median of half the time of a round trip."""
    durations = []
    with _connected(cluster, task, "ping", deadline) as connection:
        for _ in range(_PINGS):
            before = time.perf_counter()
            connection.sendall(b".")
            if (answer := connection.recv(len(_OTHER))) != b".":
                why = "has another TF_CONFIG; give all tasks the same cluster" if answer else "closed the connection"
                raise TimeoutError(f"{task} {why}; see its own line")
            durations.append(time.perf_counter() - before)
    return statistics.median(durations) / 2


def _speed(cluster: Cluster, task: Task, deadline: float) -> float:
    with _connected(cluster, task, "sink", deadline) as connection:
        end, sent = time.monotonic() + _LINK_SECS, 0
        while sent < _LINK_BYTES and time.monotonic() < end:
            connection.sendall(_CHUNK)
            sent += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = _sockets.read_line(connection, max(0.1, deadline - time.monotonic()))
    try:
        return float(answer)
    except ValueError:
        raise TimeoutError(f"{task} did not say how fast bytes have arrived; see its own output") from None


def _pass(cluster: Cluster, task: Task, links: Sequence[MeasuredLink], deadline: float) -> None:
    with _connected(cluster, task, "turn", deadline) as connection:
        connection.sendall(json.dumps([dataclasses.asdict(link) for link in links]).encode() + b"\n")
        # Closed by the other side once it has read all.
        connection.recv(1)


class _State:
    """Values that other tasks have given this one while it answers."""

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        self.digest, self.deadline = digest_of(cluster.tasks).encode(), deadline
        self.turns: queue.Queue[list[MeasuredLink]] = queue.Queue()


@contextlib.contextmanager
def _answering(cluster: Cluster, deadline: float) -> Iterator[_State]:
    """Answers other tasks within the block, a thread for each connection."""
    state = _State(cluster, deadline)
    server = socketserver.ThreadingTCPServer(("", 0), functools.partial(_Handler, state), bind_and_activate=False)
    server.socket.close()
    server.socket = _sockets.listen(_sockets.split_address(cluster.address())[1])
    server.daemon_threads = True
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()


class _Handler(socketserver.StreamRequestHandler):
    def __init__(self, state: _State, *given: Any) -> None:
        self._state = state
        super().__init__(*given)

    def handle(self) -> None:
        """Answers one request; a line without a digest gets no answer."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.connection.settimeout(_CONNECT_SECS)
            digest, kind = self.rfile.readline(_sockets.LINE_BYTES).split()
            if digest != self._state.digest:
                self.wfile.write(_OTHER)
                self.rfile.read(1)  # The ping: closing before it has come would drop the answer.
                return
            self.connection.settimeout(max(0.1, self._state.deadline - time.monotonic()))
            if kind == b"ping":
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(_PINGS):
                    self.connection.sendall(self.rfile.read(1))
            elif kind == b"sink":
                self.connection.sendall(f"{self._received()}\n".encode())
            elif kind == b"turn":
                self._state.turns.put([MeasuredLink(**each) for each in json.loads(self.rfile.readline(_MAX_LINE))])

    def _received(self) -> float:
        """Returns bytes per second of what arrives, without the first quarter; a short transfer counts whole."""
        started = last = time.perf_counter()
        received, counted, since = 0, 0, 0.0
        buffer = bytearray(2**18)
        while (count := self.rfile.readinto1(buffer)) and received <= _LINK_BYTES + len(_CHUNK):
            last = time.perf_counter()
            received += count
            if since:
                counted += count
            elif received >= _SKIPPED * _LINK_BYTES or last - started >= _SKIPPED * _LINK_SECS:
                since = last
        return counted / (last - since) if counted and last > since else received / max(last - started, 1e-9)
