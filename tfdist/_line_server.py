# SPDX-License-Identifier: Apache-2.0
"""Server of short line-based conversations at a task's own address, in one thread. No TensorFlow import.

The port of a task is open to every host that reaches its machine. A peer that stays silent, sends garbage, never ends a
line or connects a thousand times must neither delay a task of the job nor fill the memory. So the server waits for no
single peer, limits the length of a line and the time of a conversation, and closes the oldest connections when there
are too many.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from tfdist import _addresses, _sockets

T = TypeVar("T")
# Yields each line to send, and receives the peer's next line. When it returns, the peer closes the connection first.
Conversation = Generator[bytes, bytes, None]

MOST_PEERS = 128
# Longest time of a conversation from the first byte to the last; a task's conversation takes milliseconds.
PEER_SECS = 10.0
_JOIN_SECS = 5.0


class _Peer:
    def __init__(self, connection: socket.socket, host: str, until: float, conversation: Conversation) -> None:
        self.socket = connection
        self.host = host
        self.until = until
        self.conversation = conversation
        self.buffer = b""
        self.is_done = False


class LineServer:
    """Holds a short conversation, line by line, with each peer that connects, until it is closed.

    Args:
      sockets: listening sockets, which the server closes at its end.
      conversation: starts a conversation with a new peer.
      clock: returns seconds, monotonic.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        conversation: Callable[[], Conversation],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sockets = list(sockets)
        self._conversation = conversation
        self._clock = clock
        # Oldest first.
        self._peers: dict[_Peer, None] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for each in self._sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._is_to_widen = False
        self._thread = threading.Thread(target=self._run, name="tfdist-line-server", daemon=True)

    def __enter__(self) -> LineServer:
        self._thread.start()
        return self

    def listen_everywhere(self) -> None:
        """Listens at the same port on all interfaces from now on; may be called again."""
        self._is_to_widen = True
        self._wake_up()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._wake_up()
        self._thread.join(_JOIN_SECS)
        for each in (self._wake, self._woken, *self._sockets):
            each.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for key, _ in self._selector.select(self._next_timeout_secs()):
                    if isinstance(key.data, _Peer):
                        if key.data in self._peers:
                            self._receive(key.data)
                    elif key.fileobj is self._woken:
                        self._woken.recv(16)
                        if self._is_to_widen:
                            self._widen()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._sockets:
                        self._accept(key.fileobj)
                now = self._clock()
                for peer in [each for each in self._peers if each.until <= now]:
                    self._drop(peer)
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()

    def _next_timeout_secs(self) -> float | None:
        oldest = next(iter(self._peers), None)
        return None if oldest is None else max(0.0, oldest.until - self._clock())

    def _widen(self) -> None:
        self._is_to_widen = False
        addresses = [(each.family, *each.getsockname()[:2]) for each in self._sockets]
        # The kernel binds a port on all interfaces only if no socket listens there. Peers that fail meanwhile retry.
        for each in self._sockets:
            self._selector.unregister(each)
            each.close()
        try:
            self._sockets = [_sockets.listen_everywhere(addresses[0][2])]
        except OSError:
            found = [_listen_at(*each) for each in addresses]
            self._sockets = [each for each in found if each]
        for each in self._sockets:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _sockets.NO_RESOURCES:
                self._make_room()
                self._stop.wait(0.01)  # If no peer could be closed, other parts of the program must free descriptors.
            return
        if len(self._peers) >= MOST_PEERS:
            self._make_room()
        connection.setblocking(False)
        peer = _Peer(connection, address[0], self._clock() + PEER_SECS, self._conversation())
        self._peers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, lambda: next(peer.conversation))

    def _make_room(self) -> None:
        if self._peers:
            self._drop(to_give_way(self._peers, [peer.host for peer in self._peers]))

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_sockets.LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or peer.is_done:
            self._drop(peer)
            return
        peer.buffer += data
        while b"\n" in peer.buffer and not peer.is_done and peer in self._peers:
            line, _, peer.buffer = peer.buffer.partition(b"\n")
            self._send(peer, lambda line=line: peer.conversation.send(line))
        if len(peer.buffer) > _sockets.LINE_BYTES:
            self._drop(peer)

    def _send(self, peer: _Peer, answer: Callable[[], bytes]) -> None:
        try:
            data = answer()
            if peer.socket.send(data) < len(data):
                self._drop(peer)  # The peer has not read earlier lines.
        except StopIteration:
            # The peer closes first, so that the TIME_WAIT state is on its side and a server can bind this port.
            peer.is_done = True
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer]
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.conversation.close()


def to_give_way(peers: Iterable[T], hosts: Iterable[str]) -> T:
    """Returns the connection to close for a newer one: the oldest one from the host with the most connections.

    So a flood from one host closes no connection of another host. A task on the flooding host is still served if it
    completes its conversation before `MOST_PEERS` newer connections.

    Args:
      peers: at least one connection, the oldest first.
      hosts: the host of each connection.
    """
    first: dict[str, T] = {}
    count: collections.Counter[str] = collections.Counter()
    for peer, host in zip(peers, hosts, strict=True):
        first.setdefault(host, peer)
        count[host] += 1
    return first[count.most_common(1)[0][0]]


def listen(address: str, others: Iterable[str]) -> list[socket.socket]:
    """Listens at the addresses of a task's host name, and on no other interface.

    Listens on all interfaces only if the own address is unknown. That is so if the host of `address` is not on this
    machine (behind NAT), or is a loopback address while other tasks are on other machines (127.0.1.1 in /etc/hosts). A
    task that other machines reach at yet another address can't be reached at first; see `LineServer.listen_everywhere`.

    Args:
      address: "host:port" of the task.
      others: addresses of the other tasks.

    Raises:
      OSError: the port is in use, on any interface, or may not be used.
    """
    host, port = _addresses.split(address)
    _sockets.check_port(port)
    found: list[socket.socket] = []
    is_local = all(_is_loopback(each) for each in map(_host, others) if each != host)
    try:
        for family, ip in _resolve(host):
            own = _listen_at(family, ip, port) if is_local or not _is_loopback(ip) else None
            found.extend([own] if own else [])
        if not found:
            found.append(_sockets.listen_everywhere(port))
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def _listen_at(family: int, ip: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((ip, port), family=family, backlog=_sockets.BACKLOG)
    except OSError as error:
        if error.errno in _sockets.NO_SUCH_ADDRESS:
            return None
        raise


def _resolve(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((int(family), str(address[0])) for family, *_, address in found))


def _host(address: str) -> str:
    return _addresses.split(address)[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
