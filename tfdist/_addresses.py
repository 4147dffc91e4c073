# SPDX-License-Identifier: Apache-2.0
"""Parses and checks "host:port" addresses as TensorFlow's gRPC servers understand them. No TensorFlow import."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_NUMERIC = re.compile(r"[0-9.]+", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_EXAMPLE = 'write "host:port", such as "10.0.0.2:2222"'
_EXAMPLE_6 = 'write "[host]:port", such as "[fe80::1]:2222"'


def split(address: str) -> tuple[str, int]:
    """Returns the host (an IPv6 address without brackets) and the port of a valid address."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def normal(address: str) -> str:
    """Returns a valid address without the trailing dot of an absolute host name.

    Only DNS treats the names with and without the dot alike; /etc/hosts, certificates and comparisons don't.
    """
    host, colon, port = address.rpartition(":")
    return f"{host.removesuffix('.')}{colon}{port}"


def key(address: str) -> tuple[str, int]:
    """Returns a key that is equal for two valid addresses that can't both be served on one machine."""
    host, port = split(address)
    host = host.lower().removesuffix(".")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # A server listens on all interfaces, so all names of the loopback interface count as one host.
        return ("loopback" if host == "localhost" else host), port
    return ("loopback" if ip.is_loopback else str(ip)), port


def problem(address: Any) -> tuple[str, str] | None:
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
