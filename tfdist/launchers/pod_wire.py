# SPDX-License-Identifier: Apache-2.0
"""Carries messages between the wrappers of a job's pods: lines of JSON, between those who know the job's secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from typing import Any, BinaryIO

GREETING_SECS = 10.0
_LINE = 4096


def listen(port: int) -> socket.socket:
    """Listens on all addresses of the pod, of both families where there are two."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel find out within half a minute that a host is gone, as without power."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30000)):
        if hasattr(socket, name):  # Linux has them all.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proof(secret: str, *parts: object) -> str:
    """The keyed hash by which one who knows the secret is recognized."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read(lines: BinaryIO) -> dict[str, Any]:
    """The next message; {} at the end.

    Raises:
      ValueError: it is no message.
      OSError: the connection broke.
    """
    line = lines.readline(_LINE)
    if not line:
        return {}
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("not a message") from None
    if not isinstance(message, dict) or not line.endswith(b"\n"):
        raise ValueError("not a message")
    return message


def close(connection: socket.socket) -> None:
    """Closes a connection, also under a thread that reads from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
