# SPDX-License-Identifier: Apache-2.0
"""Bytes that this process has sent and received over TCP, as the kernel counts them for each socket. Linux only.

A socket's counters vanish with the socket. So a `SocketBytes` remembers the last counters of each socket, and loses
only what a connection carried between its last sample and its end.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import NamedTuple

_DIRECTORY = "/proc/self/fd"
# Offsets in Linux' struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received (4.1), tcpi_bytes_sent (4.19).
_ACKED, _RECEIVED, _SENT, _SIZE = 120, 128, 200, 208


class Bytes(NamedTuple):
    """Payload of TCP: headers of TCP and IP are left out, retransmitted bytes are not."""

    sent: int
    received: int


class SocketBytes:
    """Adds up the bytes of all TCP sockets of this process. Any thread may call it.

    Args:
      from_now: False to count what the open sockets have carried before, too.
    """

    def __init__(self, from_now: bool = True) -> None:
        self._lock = threading.Lock()
        # By inode.
        self._last: dict[str, Bytes] = {}
        self._before = Bytes(0, 0)
        self._closed = Bytes(0, 0)
        if from_now:
            self._before = self.sample()

    def sample(self) -> Bytes:
        """Returns the bytes so far, those of closed sockets as of their last sample included."""
        with self._lock:
            now = by_socket()
            for inode, last in self._last.items():
                current = now.get(inode)
                # An inode may be used again, by a socket that begins at 0.
                if current is None or current.sent < last.sent or current.received < last.received:
                    self._closed = _plus(self._closed, last)
            self._last = now
            total = self._closed
            for each in now.values():
                total = _plus(total, each)
            return Bytes(total.sent - self._before.sent, total.received - self._before.received)


def by_this_process() -> int:
    """Returns the bytes that the open TCP connections of this process have sent so far."""
    return sum(each.sent for each in by_socket().values())


def by_socket() -> dict[str, Bytes]:
    """Returns the bytes of each open TCP socket of this process by its inode; {} where there is no /proc."""
    found: dict[str, Bytes] = {}
    try:
        names = os.listdir(_DIRECTORY)  # noqa: PTH208 - called every few seconds, for hundreds of files
    except OSError:
        return found
    for name in names:
        try:
            link = os.readlink(f"{_DIRECTORY}/{name}")  # noqa: PTH115
            if not link.startswith("socket:") or link in found:
                continue
            # The family is not asked for: the option is, and other kinds of sockets don't have it.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(int(name))) as connection:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        except OSError:
            # Closed meanwhile, or of another kind.
            continue
        if len(information) >= _RECEIVED + 8:
            sent = struct.unpack_from("Q", information, _SENT if len(information) >= _SIZE else _ACKED)[0]
            found[link] = Bytes(sent, struct.unpack_from("Q", information, _RECEIVED)[0])
    return found


def _plus(first: Bytes, second: Bytes) -> Bytes:
    return Bytes(first.sent + second.sent, first.received + second.received)
