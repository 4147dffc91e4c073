# SPDX-License-Identifier: Apache-2.0
"""TCP keepalive for TensorFlow's connections: a connection to a lost host ends within seconds. No TensorFlow import.

A host that loses power or its network closes no connection. A call that waits for its answer has nothing left to send,
so TCP never notices. TensorFlow's gRPC sends no keepalive, so the chief would wait forever. Pings of gRPC are no
remedy: a gRPC server refuses a client that pings while a long step runs.

Instead, the kernel probes each connection to another task (tcp(7): SO_KEEPALIVE, TCP_USER_TIMEOUT), even while
TensorFlow holds Python's lock. The peer's kernel answers, also for a process that is slow or stopped (SIGSTOP). So a
connection ends only if the host, or the network to it, is lost. gRPC then reports UNAVAILABLE, as for a killed task.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from tfdist import _sockets
from tfdist.cluster import Cluster

# A silent task is lost after this time: a host whose kernel does not answer, a worker without a heartbeat, a chief that
# is gone, or whose coordination service does not answer. TensorFlow is given the same number. A connection ends at most
# one probe interval later.
LOST_SECS = 10
# Interval at which waits look for lost tasks. It delays the detection of errors, not the results.
POLL_SECS = 0.5
_PROBE_EVERY_SECS = 2
_LOOK_EVERY_SECS = 1.0
_RESOLVE_EVERY_SECS = 30.0
# Two fields of Linux' struct tcp_info (tcpi_unacked, tcpi_notsent_bytes), and the size that includes both.
_UNACKED = struct.Struct("24xI")
_NOT_SENT = struct.Struct("144xI")
_INFO_BYTES = 148


class Keepalive:
    """Watches the connections that this process has made to some tasks. Where Linux is not the system, it finds none.

    Args:
      addresses: "host:port" by the name of the task.
      given_up: returns the tasks whose connections are to be ended; called at each look of the thread.
    """

    def __init__(self, addresses: Mapping[str, str], given_up: Callable[[], Iterable[str]] = tuple) -> None:
        self._given_up = given_up
        self._addresses = dict(addresses)
        # Names of the tasks by IP address and port, as far as they are known.
        self._peers: dict[tuple[str, int], str] = {}
        self._unknown = set(addresses)
        self._resolve_again = 0.0
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts a thread that looks for new connections until `stop`."""
        threading.Thread(target=self._run, name="tfdist keepalive", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        self._ended.set()

    def check(self) -> None:
        """Turns on the kernel's probes for all present connections. Called by the thread, or by tests."""
        for connection, _ in self._connections():
            with contextlib.suppress(OSError):
                _probe(connection)

    def end(self, task: str) -> int:
        """Ends the connections to a task, so that every call to it fails at once; returns their number."""
        ended = 0
        for connection, owner in self._connections():
            if owner == task:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
        return ended

    def _run(self) -> None:
        while not self._ended.is_set():
            self.check()
            for task in self._given_up():
                self.end(task)
            self._ended.wait(_LOOK_EVERY_SECS)

    def _resolve(self) -> None:
        # A task that was replaced may have another address under its name.
        is_due = time.monotonic() >= self._resolve_again
        if is_due:
            self._resolve_again = time.monotonic() + _RESOLVE_EVERY_SECS
        for task in list(self._addresses if is_due else self._unknown):
            host, port = _sockets.split_address(self._addresses[task])
            # A name that no resolver takes is a UnicodeError.
            with contextlib.suppress(OSError, UnicodeError):
                for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    self._peers[_plain(str(address[0])), port] = task
                self._unknown.discard(task)

    def _connections(self) -> Iterator[tuple[socket.socket, str]]:
        """Yields each connection to a task, as a duplicate of gRPC's socket, with the name of the task."""
        self._resolve()
        for _, connection in _sockets.connections():
            # Not connected yet.
            with contextlib.suppress(OSError):
                host, port = connection.getpeername()[:2]
                if (_plain(host), port) in self._peers:
                    yield connection, self._peers[_plain(host), port]


def watch(cluster: Cluster, given_up: Callable[[], Iterable[str]] = tuple) -> Keepalive:
    """Starts to probe the connections of this process to all other tasks of its cluster; see `Keepalive`."""
    others = [task for task in cluster.tasks if task != cluster.task and task.type != "evaluator"]
    found = Keepalive({str(task): cluster.address(task) for task in others}, given_up)
    found.start()
    return found


def _plain(host: str) -> str:
    """Returns an IP address without its interface, and without "::ffff:": gRPC reaches IPv4 through IPv6 sockets."""
    return host.partition("%")[0].removeprefix("::ffff:")


def _probe(connection: socket.socket) -> None:
    # Options are set only where they differ.
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, _PROBE_EVERY_SECS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECS // _PROBE_EVERY_SECS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # For unacknowledged data: the kernel sends no keepalive probes while there are any.
    timeout_ms = 0 if _is_held_back(connection) else LOST_SECS * 1000
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) != timeout_ms:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _is_held_back(connection: socket.socket) -> bool:
    """Returns True if the peer's kernel acknowledged everything and its receive window is full.

    The peer's process is then slow or stopped, and its host is alive.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return False
    return not _UNACKED.unpack_from(info)[0] and bool(_NOT_SENT.unpack_from(info)[0])
