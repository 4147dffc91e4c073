# SPDX-License-Identifier: Apache-2.0
"""Messages between the wrappers of a job's pods: lines of JSON, authenticated with the job's secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from typing import Any, BinaryIO

from tfdist import _sockets

GREETING_SECS = 10.0


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel detect within half a minute that a host is lost, for example without power."""
    connection.settimeout(None)
    _sockets.keep_alive(connection, idle_secs=10, every_secs=5, probes=4)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000)


def proof(secret: str, *parts: object) -> str:
    """Returns the HMAC-SHA256 of `parts`, which proves that the sender knows the secret."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def read(lines: BinaryIO) -> dict[str, Any]:
    """Reads the next message; returns {} at the end.

    Raises:
      ValueError: the line is no message.
      OSError: the connection broke.
    """
    line = lines.readline(_sockets.LINE_BYTES)
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
    """Closes a connection, even if another thread is reading from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
