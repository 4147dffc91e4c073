# SPDX-License-Identifier: Apache-2.0
"""Sockets: "host:port" addresses as TensorFlow's gRPC servers understand them, listening, proofs, a server of lines.

The port of a task is open to every host that reaches its machine. A hostile peer stays silent, sends garbage, never
ends a line or connects a thousand times. It must neither delay a task of the job nor fill the memory. So the server
waits for no single peer, and limits the length of a line and the time of a conversation. It closes the oldest
connections when there are too many.

No TensorFlow import.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import hmac
import ipaddress
import json
import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from tfdist import _forks

# Yields each line to send, or b"", and receives the peer's next line. Once it has returned, the peer closes first.
Conversation = Generator[bytes, bytes, None]

# Most open connections of peers that have not proved that they belong to the job.
MOST_PEERS = 128
# Longest time of a conversation from the first byte to the last; a task's conversation takes milliseconds.
PEER_SECS = 10.0
_JOIN_SECS = 5.0
LINE_BYTES = 4096
BACKLOG = 128
# Error codes of a process, or a system, without free descriptors or buffers for another connection.
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Error codes of an address that no interface of this machine has.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_NUMERIC = re.compile(r"[0-9.]+", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_EXAMPLE = 'write "host:port", such as "10.0.0.2:2222"'
_EXAMPLE_6 = 'write "[host]:port", such as "[fe80::1]:2222"'


def split_address(address: str) -> tuple[str, int]:
    """Returns the host (an IPv6 address without brackets) and the port of a valid address."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def normal_address(address: str) -> str:
    """Returns a valid address without the trailing dot of an absolute host name.

    Only DNS treats the names with and without the dot alike; /etc/hosts, certificates and comparisons don't.
    """
    host, colon, port = address.rpartition(":")
    return f"{host.removesuffix('.')}{colon}{port}"


def address_key(address: str) -> tuple[str, int]:
    """Returns a key that is equal for two valid addresses that can't both be served on one machine."""
    host, port = split_address(address)
    host = host.lower().removesuffix(".")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # A server listens on all interfaces, so all names of the loopback interface count as one host.
        return ("loopback" if host == "localhost" else host), port
    return ("loopback" if ip.is_loopback else str(ip)), port


def address_problem(address: Any) -> tuple[str, str] | None:
    """Returns the problem of an invalid address and its remedy, or None for a valid one."""
    if not isinstance(address, str):
        return "is not a string", _EXAMPLE
    if "://" in address:
        return "has a scheme in front of its host", f"remove it; {_EXAMPLE}"
    host, colon, port = address.rpartition(":")
    if host.startswith("["):
        return _ipv6_problem(host) or _port_problem(port)
    if address.startswith("["):
        return "has no port", _EXAMPLE_6
    if ":" in host:
        return "has more than one colon; an IPv6 host goes in brackets", _EXAMPLE_6
    if not colon:
        return "has no port", _EXAMPLE
    if not host:
        return "has no host", _EXAMPLE
    return _host_problem(host) or _port_problem(port)


def _ipv6_problem(host: str) -> tuple[str, str] | None:
    if not host.endswith("]"):
        # Reached for "[::1]" and "[::1", because their last colon is part of the host.
        return "has no port after its bracketed host", _EXAMPLE_6
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return "has no valid IPv6 address in its brackets", _EXAMPLE_6
    return None


def _host_problem(host: str) -> tuple[str, str] | None:
    if not _HOST.fullmatch(host) or len(host) > 254:
        return "has a host that is neither a name nor an address", _EXAMPLE
    if _NUMERIC.fullmatch(host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return "has a host that looks like an IPv4 address and is not one", _EXAMPLE
    return None


def _port_problem(port: str) -> tuple[str, str] | None:
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return "has a port that is not a number from 1 to 65535", _EXAMPLE
    return None


def proof(secret: bytes, *words: object) -> bytes:
    """Proof that the sender of `words` knows the job's secret, which itself is not sent.

    HMAC-SHA256 (RFC 2104) of the words as JSON, so no two lists of words are the same message. The words are the
    protocol, the sender's role, and a nonce of each side. With an empty secret a proof proves nothing.
    """
    return hmac.digest(secret, json.dumps(words).encode(), "sha256")


def is_proof(received: bytes | str, secret: bytes, *words: object) -> bool:
    """Returns True for the `proof` of these words, as bytes or in hexadecimal digits. Compares in constant time."""
    expected = proof(secret, *words)
    if isinstance(received, str):
        return hmac.compare_digest(received.encode(errors="replace"), expected.hex().encode())
    return hmac.compare_digest(received, expected)


def listen(port: int) -> socket.socket:
    """Listens on all interfaces, for IPv6 and IPv4 where the machine has both, as TensorFlow's server does.

    Raises:
      OSError: the port is in use, on any interface, or may not be used.
    """
    create = functools.partial(socket.create_server, ("", port), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return _forks.keep(create(family=socket.AF_INET6, dualstack_ipv6=True))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:  # These mean that IPv6 is switched off.
                raise
    return _forks.keep(create())


def connection_error(address: str, timeout_secs: float) -> Exception | None:
    """Connects to a valid address; returns the error, which for a name that no resolver takes is a UnicodeError."""
    try:
        socket.create_connection(split_address(address), timeout=timeout_secs).close()
    except (OSError, UnicodeError) as error:
        return error
    return None


def read_line(connection: socket.socket, timeout_secs: float, prefix: bytes = b"") -> bytes:
    """Reads a line; stops early if the data are too long, or don't begin with `prefix`.

    Raises:
      OSError: the connection broke, or no complete line arrived in time (TimeoutError).
    """
    line, until = b"", time.monotonic() + timeout_secs
    while not line.endswith(b"\n") and len(line) < LINE_BYTES and line[: len(prefix)] == prefix[: len(line)]:
        # The timeout is for the whole line, not for each byte.
        left_secs = until - time.monotonic()
        if left_secs <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_secs)
        data = connection.recv(LINE_BYTES)
        if not data:
            break
        line += data
    return line


class Peer:
    """A connection to a `LineServer`.

    Attributes:
      name: "host:port" at its other end.
      reason: why the server closed it, as a clause after "which"; "" before.
    """

    def __init__(self, connection: socket.socket, name: str, until: float) -> None:
        self.name, self.reason = name, ""
        self._socket, self._until = connection, until
        self._buffer = b""
        self._is_done = False
        self._conversation: Conversation

    @property
    def host(self) -> str:
        """The host at its other end."""
        return self.name.rpartition(":")[0]

    def stay(self) -> None:
        """Ends the time limit of the conversation: the peer has proved that it belongs to the job."""
        self._until = math.inf


class LineServer:
    """Holds a conversation, line by line, with each peer that connects, until it is closed.

    One thread runs all conversations. A conversation is a generator; it is closed when the connection is.

    Args:
      listener: listening socket, which the server closes at its end.
      conversation: starts a conversation with a new peer.
      clock: returns seconds, monotonic.
      tick: called by the server's thread every `every_secs` seconds.
      every_secs: interval of `tick`.
    """

    def __init__(
        self,
        listener: socket.socket,
        conversation: Callable[[Peer], Conversation],
        clock: Callable[[], float] = time.monotonic,
        tick: Callable[[], object] | None = None,
        every_secs: float = math.inf,
    ) -> None:
        self._listener = listener
        self._conversation = conversation
        self._clock = clock
        self._tick, self._every_secs = tick, every_secs
        self._next_tick = clock() + every_secs
        # Oldest first.
        self._peers: dict[Peer, None] = {}
        # The peer whose conversation runs now.
        self._talking: Peer | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-line-server", daemon=True)

    def __enter__(self) -> LineServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and all connections; may be called again, also by a conversation."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
        for each in (self._wake, self._woken, self._listener):
            each.close()

    @property
    def is_closing(self) -> bool:
        """True once the server ends, and all conversations with it."""
        return self._stop.is_set()

    def send(self, peer: Peer, line: bytes) -> None:
        """Sends a line; called in conversations and by `tick`. Closes a connection that has not taken earlier lines."""
        if peer not in self._peers or peer.reason:
            return
        try:
            if peer._socket.send(line) < len(line):
                self.drop(peer, "does not read what it is sent")
        except OSError as error:
            self.drop(peer, f"broke the connection ({error.strerror or error})")

    def drop(self, peer: Peer, reason: str = "") -> None:
        """Closes a connection, in conversations and by `tick`."""
        peer.reason = peer.reason or reason
        # A conversation that runs is closed when it waits again.
        if peer is self._talking or peer not in self._peers:
            return
        del self._peers[peer]
        self._selector.unregister(peer._socket)
        peer._socket.close()
        peer._conversation.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for key, _ in self._selector.select(self._next_timeout_secs()):
                    if isinstance(key.data, Peer):
                        if key.data in self._peers:
                            self._receive(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                now = self._clock()
                for peer in [each for each in self._peers if each._until <= now]:
                    self.drop(peer, f"took longer than {PEER_SECS:.0f} s")
                if self._tick is not None and now >= self._next_tick:
                    self._next_tick = now + self._every_secs
                    self._tick()
        finally:
            self._stop.set()
            for peer in list(self._peers):
                self.drop(peer)
            self._selector.close()

    def _next_timeout_secs(self) -> float | None:
        until = min((peer._until for peer in self._peers), default=math.inf)
        until = min(until, self._next_tick)
        return None if until == math.inf else max(0.0, until - self._clock())

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                self._make_room("stayed silent while no more could be opened")
                self._stop.wait(0.01)  # If no peer could be closed, other parts of the program must free descriptors.
            return
        if len(self._strangers()) >= MOST_PEERS:
            self._make_room(f"was one of more than {MOST_PEERS} strangers")
        _forks.keep(connection).setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # An address of IPv4 as one of IPv6 (RFC 4291).
        host = address[0].removeprefix("::ffff:")
        peer = Peer(connection, f"{host}:{address[1]}", self._clock() + PEER_SECS)
        peer._conversation = self._conversation(peer)
        self._peers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._talk(peer, lambda: next(peer._conversation))

    def _strangers(self) -> list[Peer]:
        return [peer for peer in self._peers if peer._until != math.inf]

    def _make_room(self, reason: str) -> None:
        """Closes the oldest connection of a stranger from the host with the most of them.

        So a flood from one host closes no connection of another host. A task on the flooding host is still served if it
        completes its conversation before `MOST_PEERS` newer connections.
        """
        if strangers := self._strangers():
            ((host, _),) = collections.Counter(peer.host for peer in strangers).most_common(1)
            self.drop(next(peer for peer in strangers if peer.host == host), reason)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer._socket.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(peer, f"broke the connection ({error.strerror or error})")
            return
        if not data or peer._is_done:
            self.drop(peer, "sent more than it was to" if data else "closed the connection")
            return
        peer._buffer += data
        while b"\n" in peer._buffer and not peer._is_done and peer in self._peers:
            line, _, peer._buffer = peer._buffer.partition(b"\n")
            self._talk(peer, lambda line=line: peer._conversation.send(line))
        if len(peer._buffer) > LINE_BYTES:
            self.drop(peer, "sent a line without an end")

    def _talk(self, peer: Peer, answer: Callable[[], bytes]) -> None:
        self._talking, line = peer, b""
        try:
            line = answer()
        except StopIteration:
            # The peer closes first, so that the TIME_WAIT state is on its side and a server can bind this port.
            peer._is_done = True
        finally:
            self._talking = None
        if peer.reason:
            self.drop(peer)
        elif line:
            self.send(peer, line)
