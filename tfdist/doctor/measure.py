# SPDX-License-Identifier: Apache-2.0
"""Tasks of a cluster that run `tfdist doctor --measure` at the same time measure the links between them.

No TensorFlow import. The tasks take turns in the order of the cluster, so that no two links are
measured at a time. The turn, with the links so far, goes round twice: in the first lap each task measures its links,
in the second each gets all of them.

    measuring -> other task   DIGEST link        then single bytes, which come back; then bytes until the connection is
                                                 half closed; the answer is bytes per second, without the first quarter
    any -> next task          DIGEST turn        then a line of JSON: the links so far

A task measures with tasks of its own cluster only: DIGEST is of all tasks. Another one gets the answer _OTHER.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

    def __str__(self) -> str:
        speed, latency = self.bytes_per_sec / 0.125e9, 1e6 * self.latency_secs
        return f"{self.source} to {self.target}: {speed:.3g} Gbit/s, {latency:.0f} us"


def peers(tasks: Sequence[Task], task: Task) -> list[Task]:
    """Returns the tasks to which `task` measures: all others; in a large cluster, those at distances of powers of 2."""
    own, count = tasks.index(task), len(tasks)
    powers = [2**power for power in range(math.ceil(math.log2(count)))]
    return [tasks[(own + distance) % count] for distance in (range(1, count) if count <= _MOST_PEERS + 1 else powers)]


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
        is_first = cluster.task == cluster.tasks[0]
        if output and is_first:
            _files.check_writable(output, "--json")
        links = measure(cluster, timeout_secs)
        if output and is_first:
            hosts = {_sockets.address_key(cluster.address(task))[0] for task in cluster.tasks}
            _files.write(output, to_json(links, is_one_machine=len(hosts) == 1))
    except (ValueError, OSError) as error:  # TimeoutError is an OSError.
        _log.say(str(error))
        return 1
    lines = [str(link) for link in links if link.source == str(cluster.task)]
    if is_first:
        lines.append(f"{len(links)} links, the slowest: {min(links, key=lambda link: link.bytes_per_sec)}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return 0


def measure(cluster: Cluster, timeout_secs: float) -> list[MeasuredLink]:
    """Measures, with all other tasks, which call this at the same time.

    Args:
      cluster: all tasks, with this one.
      timeout_secs: longest time for all of it.

    Returns:
      The links of all tasks, the same list on each.

    Raises:
      ValueError: there is no other task.
      TimeoutError: another task did not take its turn in time; the message names the first one that is missing.
      OSError: this task can't listen at its address.
    """
    tasks, deadline = list(cluster.tasks), time.monotonic() + timeout_secs
    if cluster.task not in tasks or len(tasks) < 2:
        raise ValueError(f"there is no link to measure: {cluster.task} has no other task")
    own = tasks.index(cluster.task)
    following, is_last = tasks[(own + 1) % len(tasks)], own + 1 == len(tasks)
    with _Server(cluster, deadline) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            links = server.wait(tasks[own - 1], timeout_secs) if own else []
            links += [_measured(cluster, peer, deadline) for peer in peers(tasks, cluster.task)]
            _pass(cluster, following, links, deadline)
            links = server.wait(tasks[own - 1], timeout_secs)
            if not is_last:
                _pass(cluster, following, links, deadline)
        finally:
            server.shutdown()
    return links


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
        if (given["format"], given["version"]) != (FORMAT, VERSION) or not given["links"]:
            raise ValueError(f"format {given['format']!r}, version {given['version']!r}, {len(given['links'])} links")
        return [MeasuredLink(**each) for each in given["links"]], given.get("one_machine") is True
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        again = f"write it with tfdist doctor --measure --json={name}"
        raise ValueError(f"{name} has no links of a {FORMAT} of version {VERSION} ({error}); {again}") from None


@contextlib.contextmanager
def _connected(cluster: Cluster, task: Task, kind: str, deadline: float) -> Iterator[socket.socket]:
    where = cluster.address(task)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{task} at {where} does not answer; does it run tfdist doctor, too?")
        try:
            connection = socket.create_connection(_sockets.split_address(where), min(_CONNECT_SECS, left))
            break
        except OSError:
            time.sleep(min(0.2, left))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sendall(f"{digest_of(cluster.tasks)} {kind}\n".encode())
        yield connection


def _measured(cluster: Cluster, task: Task, deadline: float) -> MeasuredLink:
    """Measures the link to a task; latency is the median of half the time of a round trip."""
    durations = []
    with _connected(cluster, task, "link", deadline) as connection:
        for _ in range(_PINGS):
            before = time.perf_counter()
            connection.sendall(b".")
            if (answer := connection.recv(len(_OTHER))) != b".":
                why = "has another TF_CONFIG; give all tasks the same cluster" if answer else "closed the connection"
                raise TimeoutError(f"{task} {why}; see its own line")
            durations.append(time.perf_counter() - before)
        end, sent = time.monotonic() + _LINK_SECS, 0
        while sent < _LINK_BYTES and time.monotonic() < end:
            connection.sendall(_CHUNK)
            sent += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        speed = _sockets.read_line(connection, max(0.1, deadline - time.monotonic()))
    if not speed:
        raise TimeoutError(f"{task} did not say how fast bytes have arrived; see its own output")
    return MeasuredLink(str(cluster.task), str(task), float(speed), statistics.median(durations) / 2)


def _pass(cluster: Cluster, task: Task, links: Sequence[MeasuredLink], deadline: float) -> None:
    with _connected(cluster, task, "turn", deadline) as connection:
        connection.sendall(json.dumps([dataclasses.asdict(link) for link in links]).encode() + b"\n")
        # Closed by the other side once it has read all.
        connection.recv(1)


class _Server(socketserver.ThreadingTCPServer):
    """Answers other tasks, a thread for each connection."""

    daemon_threads = True

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = _sockets.listen(_sockets.split_address(cluster.address())[1])
        self.digest, self.deadline = digest_of(cluster.tasks).encode(), deadline
        self.turns: queue.Queue[list[MeasuredLink]] = queue.Queue()

    def wait(self, previous: Task, timeout_secs: float) -> list[MeasuredLink]:
        """Waits for this task's turn; returns the links so far."""
        try:
            return self.turns.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            late = f"waited {timeout_secs:g} s for {previous}, which has not measured"
            raise TimeoutError(f"{late}; if it runs, see its own line, or raise --measure_secs") from None


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answers one request; a line without a digest gets no answer."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.connection.settimeout(_CONNECT_SECS)
            digest, kind = self.rfile.readline(_sockets.LINE_BYTES).split()
            if digest != self.server.digest:
                self.wfile.write(_OTHER)
                self.rfile.read(1)  # The ping: closing before it has come would drop the answer.
                return
            self.connection.settimeout(max(0.1, self.server.deadline - time.monotonic()))
            if kind == b"turn":
                self.server.turns.put([MeasuredLink(**each) for each in json.loads(self.rfile.readline(_MAX_LINE))])
            else:
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(_PINGS):
                    self.connection.sendall(self.rfile.read(1))
                self.connection.sendall(f"{self._received()}\n".encode())

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
