# SPDX-License-Identifier: Apache-2.0
"""Lines between tasks over a socket: a server, its clients, and how both prove that they belong to the job.

    server -> client   greeting   tfdist PURPOSE SERVER NONCE
    client -> server   claim      tfdist PURPOSE CLIENT NONCE PROOF
    server -> client   answer     tfdist PROOF, or REFUSED

A proof is that of `_sockets.proof`, of both names and nonces, and of the sender's role; the secret itself is not sent.
Without a secret, tasks trust each other. A side that doesn't follow raises `ProtocolError`, and closes the connection.

The port of a task is open to every host that reaches its machine. A hostile peer stays silent, sends garbage, never
ends a line or connects a thousand times. It must neither delay a task of the job nor fill the memory. So the server
waits for no single peer, and limits the length of a line and the time of a conversation. It closes the oldest
connections when there are too many.

No TensorFlow import.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from tfdist import _forks, _sockets

# Yields each line to send, or b"", and receives the peer's next line. Once it has returned, the peer closes first.
Conversation = Generator[bytes, bytes, None]

# Most open connections of peers that have not proved that they belong to the job.
MOST_PEERS = 128
# Longest time of a conversation from the first byte to the last; a task's conversation takes milliseconds.
PEER_SECS = 10.0
REFUSED = b"tfdist refused\n"
_MAGIC = "tfdist"
_NONCE_BYTES = 32
_JOIN_SECS = 5.0
_SECRET = "TFDIST_JOB_SECRET must be the same for all tasks, or for no task"


class ProtocolError(Exception):
    """The other side sent an invalid message. The text follows the sender's name in a sentence."""


class ForeignError(ProtocolError):
    """A server of another kind answers, such as TensorFlow's."""


def identify(secret: bytes, purpose: str, name: str) -> Generator[bytes, bytes, tuple[str, bytes]]:
    """The server's side of the introduction, as the beginning of a conversation.

    Args:
      secret: shared secret of the job; b"" for none.
      purpose: word that is equal on both sides, such as the protocol.
      name: name of this side.

    Returns:
      The name of the client, which has proved its identity, and the answer to it.
    """
    nonce = secrets.token_hex(_NONCE_BYTES)
    words = (yield _line(purpose, name, nonce)).decode(errors="replace").split()
    if len(words) != 5 or words[:2] != [_MAGIC, purpose]:
        raise ProtocolError("does not speak this protocol")
    client, asked, proof = words[2:]
    if not _sockets.is_proof(proof, secret, purpose, "client", client, name, nonce, asked):
        raise ProtocolError("does not know this job's secret")
    return client, _line(_sockets.proof(secret, purpose, "server", client, name, nonce, asked))


def _line(*words: str) -> bytes:
    return f"{' '.join([_MAGIC, *words])}\n".encode()


class Connection:
    """Connection of a client to a `LineServer`. One thread reads.

    Args:
      address: host and port of the server.
      timeout_secs: longest wait for the connection, and for each line.

    Raises:
      OSError: the server can't be reached.
    """

    def __init__(self, address: tuple[str, int], timeout_secs: float) -> None:
        self.socket = _forks.keep(socket.create_connection(address, timeout_secs))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timeout_secs = timeout_secs
        # Bytes of a line that has not come whole, and of later ones.
        self._buffer = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def introduce(self, secret: bytes, purpose: str, name: str, server: str) -> None:
        """Proves to the server that this side belongs to the job, and has it prove the same; see `identify`.

        Raises:
          ProtocolError: the other side is no such server, or does not accept this one.
          ForeignError: it does not speak in lines of tfdist.
          EOFError: the other side has closed the connection.
          OSError: the connection broke, or no answer arrived in time (TimeoutError).
        """
        words = self._read_words(_MAGIC.encode())
        if words[0] != _MAGIC:
            raise ForeignError("does not speak this protocol")
        if len(words) != 4 or words[1] != purpose:
            raise ProtocolError("belongs to a cluster of other tasks: its TF_CONFIG differs")
        if words[2] != server:
            raise ProtocolError(f"says that it is {words[2][:40]!r}")
        signed = name, server, words[3], secrets.token_hex(_NONCE_BYTES)
        self.socket.sendall(_line(purpose, name, signed[3], _sockets.proof(secret, purpose, "client", *signed)))
        answer = self._read_words()
        if answer == REFUSED.decode().split():
            raise ProtocolError(f"does not accept {name}; {_SECRET}")
        if not _sockets.is_proof(answer[-1], secret, purpose, "server", *signed):
            raise ProtocolError(f"does not know this job's secret; {_SECRET}")

    def _read_words(self, prefix: bytes = b"") -> list[str]:
        line = self.read_line(prefix)
        if not line:
            raise EOFError("closed the connection")
        return line.decode(errors="replace").split() or [""]

    def read_line(self, prefix: bytes = b"") -> bytes:
        """Reads a line, or the first bytes of what does not begin with `prefix`; b"" at the end of the connection.

        Raises:
          ProtocolError: the line is too long.
          OSError: the connection broke, or no complete line arrived in time (TimeoutError).
        """
        # The timeout is for the whole line, not for each byte.
        until = time.monotonic() + self._timeout_secs
        while b"\n" not in self._buffer:
            if self._buffer[: len(prefix)] != prefix[: len(self._buffer)]:
                return self._buffer
            if len(self._buffer) > _sockets.LINE_BYTES:
                raise ProtocolError("sent a line without an end")
            if (left_secs := until - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self.socket.settimeout(left_secs)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = self.socket.recv(_sockets.LINE_BYTES)
            if not data:
                return b""
            self._buffer += data
        line, end, self._buffer = self._buffer.partition(b"\n")
        return line + end


class Peer(asyncio.Protocol):
    """A connection to a `LineServer`.

    Attributes:
      host: the host at its other end.
      name: "host:port" there.
      reason: why the server closed it, as a clause after "which"; "" before.
      has_left: True if the other side has closed it.
      is_stranger: True until the peer has proved that it belongs to the job.
    """

    def __init__(self, server: LineServer, address: Any) -> None:
        # An address of IPv4 as one of IPv6 (RFC 4291).
        self.host = address[0].removeprefix("::ffff:")
        self.name = f"{self.host}:{address[1]}"
        self.reason = ""
        self.is_stranger, self.has_left = True, False
        self._server = server
        self._conversation = server.conversation(self)
        self._limit = server.loop.call_later(PEER_SECS, self.drop, f"took longer than {PEER_SECS:.0f} s")
        self._transport: asyncio.Transport
        self._buffer = b""
        self._is_done = False

    def stay(self) -> None:
        """Ends the time limit of the conversation: the peer has proved that it belongs to the job."""
        self.is_stranger = False
        self._limit.cancel()

    def send(self, line: bytes) -> None:
        """Sends a line; called in the server's thread. Closes a connection that has not taken earlier lines."""
        if line and not self.reason:
            self._transport.write(line)
            if self._transport.get_write_buffer_size():
                self.drop("does not read what it is sent")

    def drop(self, reason: str) -> None:
        """Closes the connection; called in the server's thread."""
        self.reason = self.reason or reason
        self._server.peers.pop(self, None)
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Begins the conversation; called by asyncio, as those that follow."""
        self._transport = transport
        self._server.peers[self] = None
        self._talk(None)

    def data_received(self, data: bytes) -> None:
        """Goes on with the conversation."""
        self._buffer += data
        while b"\n" in self._buffer and not self.reason:
            line, _, self._buffer = self._buffer.partition(b"\n")
            self._talk(line)
        if len(self._buffer) > _sockets.LINE_BYTES:
            self.drop("sent a line without an end")

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the conversation."""
        self.has_left = not self.reason
        self.drop("closed the connection" if exc is None else f"broke the connection ({exc})")
        self._limit.cancel()
        self._conversation.close()
        self._server.ended(self)

    def _talk(self, line: bytes | None) -> None:
        if self._is_done:
            self.drop("sent more than it was to")
            return
        try:
            self.send(self._conversation.send(line))  # pyright: ignore
        except StopIteration:
            # The peer closes first, so that the TIME_WAIT state is on its side and a server can bind this port.
            self._is_done = True
        except ProtocolError as error:
            if self.is_stranger:
                # One with another secret then fails at once instead of trying again.
                self.send(REFUSED)
            self.drop(str(error))


class LineServer:
    """Holds a conversation, line by line, with each peer that connects, until it is closed.

    One thread runs all conversations. A conversation is a generator; it is closed when the connection is.

    Args:
      listener: listening socket, which the server closes at its end.
      conversation: starts a conversation with a new peer.
      ended: called with a peer whose connection was closed.
      tick: called every `every_secs` seconds, in the server's thread as all others.
      every_secs: interval of `tick`; None for never.

    Attributes:
      peers: the open connections, oldest first.
      loop: runs the server's thread.
      is_closing: True once the server ends, and all conversations with it.
    """

    def __init__(
        self,
        listener: socket.socket,
        conversation: Callable[[Peer], Conversation],
        ended: Callable[[Peer], object] = lambda peer: None,
        tick: Callable[[], object] = lambda: None,
        every_secs: float | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self.conversation, self.ended = conversation, ended
        self._tick, self._every_secs = tick, every_secs
        self.peers: dict[Peer, None] = {}
        self.is_closing = False
        # Whatever kind of loop the program has chosen: this one sends at once.
        self.loop, self._stop = asyncio.SelectorEventLoop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-line-server", daemon=True)

    def __enter__(self) -> LineServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and all connections; may be called again, also by a conversation."""
        self.is_closing = True
        with contextlib.suppress(RuntimeError):  # The thread has ended.
            self.loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        try:
            while not self.is_closing:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._every_secs)
                    return
                self._tick()
        finally:
            self.is_closing = True
            accepting.cancel()
            for peer in list(self.peers):
                peer.drop("")
            # The conversations end.
            await asyncio.sleep(0)

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self.loop.sock_accept(self._listener)
                if sum(peer.is_stranger for peer in self.peers) >= MOST_PEERS:
                    self._make_room(f"was one of more than {MOST_PEERS} strangers")
                _forks.keep(connection).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self.loop.connect_accepted_socket(functools.partial(Peer, self, address), connection)
            except OSError:
                # Without descriptors or buffers. If no peer can be closed, other parts of the program must free some.
                self._make_room("stayed silent while no more could be opened")
                await asyncio.sleep(0.01)

    def _make_room(self, reason: str) -> None:
        """Closes the oldest connection of a stranger from the host with the most of them.

        So a flood from one host closes no connection of another host. A task on the flooding host is still served if it
        completes its conversation before `MOST_PEERS` newer connections.
        """
        strangers = [peer for peer in self.peers if peer.is_stranger]
        if strangers:
            ((host, _),) = collections.Counter(peer.host for peer in strangers).most_common(1)
            next(peer for peer in strangers if peer.host == host).drop(reason)
