# SPDX-License-Identifier: Apache-2.0
"""Helpers for TCP sockets that several modules share. No TensorFlow import."""

from __future__ import annotations

import errno
import socket
import time

LINE_BYTES = 4096
BACKLOG = 128
# Error codes of a process, or a system, without free descriptors or buffers for another connection.
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Error codes of an address that no interface of this machine has.
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


def listen_everywhere(port: int) -> socket.socket:
    """Listens on all interfaces, for IPv6 and IPv4 where the machine has both.

    Raises:
      OSError: the port is in use, or may not be used.
    """
    bound = _bind_everywhere(port)
    try:
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def check_port(port: int) -> None:
    """Raises OSError if this process can't listen at a port on all interfaces, as TensorFlow's server does."""
    _bind_everywhere(port).close()


def _bind_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _bind(socket.AF_INET6, port)
        except OSError as error:
            if error.errno not in NO_SUCH_ADDRESS:  # These mean that IPv6 is switched off.
                raise
    return _bind(socket.AF_INET, port)


def _bind(family: socket.AddressFamily, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def keep_alive(connection: socket.socket, idle_secs: int, every_secs: int, probes: int) -> None:
    """Turns on TCP keepalive: the kernel probes an idle connection, and ends it without an answer (tcp(7))."""
    for name, value in (("TCP_KEEPIDLE", idle_secs), ("TCP_KEEPINTVL", every_secs), ("TCP_KEEPCNT", probes)):
        if hasattr(socket, name):  # Linux has them all.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


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
