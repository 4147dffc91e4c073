# SPDX-License-Identifier: Apache-2.0
"""Sockets: "host:port" addresses as TensorFlow's gRPC servers understand them, listening, proofs, and what is open.

No TensorFlow import.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

from tfdist import _forks

LINE_BYTES = 1 << 14
_BACKLOG = 128
# Error codes of an address that no interface of this machine has.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_IN_BRACKETS = re.compile(r"\[(.*)\]")
_NUMERIC = re.compile(r"[0-9.]+", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


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
    remedy = 'write "host:port", such as "10.0.0.2:2222" or "[fe80::1]:2222"'
    if not isinstance(address, str):
        return "is not a string", remedy
    host, _, port = address.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return "has no port from 1 to 65535", remedy
    try:
        if in_brackets := _IN_BRACKETS.fullmatch(host):
            ipaddress.IPv6Address(in_brackets[1])
        elif _NUMERIC.fullmatch(host):
            ipaddress.IPv4Address(host)
        elif not _HOST.fullmatch(host) or len(host) > 254:
            raise ValueError
    except ValueError:
        return "has a host that is neither a name nor an IP address", remedy
    return None


def proof(secret: bytes, *words: object) -> str:
    """Proof that the sender of `words` knows the job's secret, which itself is not sent.

    HMAC-SHA256 (RFC 2104) of the words as JSON, so no two lists of words are the same message. The words are the
    protocol, the sender's role, and a nonce of each side. With an empty secret a proof proves nothing.
    """
    return hmac.digest(secret, json.dumps(words).encode(), "sha256").hex()


def is_proof(received: str, secret: bytes, *words: object) -> bool:
    """Returns True for the `proof` of these words. Compares in constant time."""
    return hmac.compare_digest(received.encode(errors="replace"), proof(secret, *words).encode())


def listen(port: int) -> socket.socket:
    """Listens on all interfaces, for IPv6 and IPv4 where the machine has both, as TensorFlow's server does.

    Raises:
      OSError: the port is in use, on any interface, or may not be used.
    """
    create = functools.partial(socket.create_server, ("", port), backlog=_BACKLOG)
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


def read_line(connection: socket.socket, timeout_secs: float) -> bytes:
    """Reads a line of at most `LINE_BYTES`, the last one of a connection; raises OSError if none arrives in time."""
    connection.settimeout(timeout_secs)
    with connection.makefile("rb") as file:
        return file.readline(LINE_BYTES)


def connections() -> Iterator[tuple[str, socket.socket]]:
    """Yields each TCP socket of this process, gRPC's included, by its inode; none where there is no /proc.

    It is a duplicate, which is closed by the next step and leaves the connection open. It is declared non-blocking, as
    Python, after `socket.setdefaulttimeout`, would otherwise make the connection itself non-blocking.
    """
    folder, seen = "/proc/self/fd", set[str]()
    try:
        names = os.listdir(folder)  # noqa: PTH208 - called every second, for hundreds of files
    except OSError:
        return
    for name in names:
        # Closed meanwhile, or of another kind.
        with contextlib.suppress(OSError):
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115
            if not link.startswith("socket:") or link in seen:
                continue
            # This family has room for addresses of all others.
            kind = socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            copy = os.dup(int(name))
            try:
                connection = socket.socket(*kind, fileno=copy)
            except OSError:
                os.close(copy)
                raise
            with connection:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                    seen.add(link)
                    yield link, connection
