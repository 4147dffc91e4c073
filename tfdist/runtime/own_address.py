# SPDX-License-Identifier: Apache-2.0
"""Finds the address of this machine at which the other machines of a cluster reach it. No TensorFlow import.

On many systems a machine's own name resolves to a loopback address (127.0.1.1 in /etc/hosts on Debian and Ubuntu). A
server that listens there can't be reached from other machines.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence


class System:
    """Queries to the operating system about addresses. Tests pass a fake."""

    def resolve(self, host: str) -> list[str]:
        """Returns the IP addresses of a name or an address, the preferred one first; [] for an unknown name."""
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return []
        return [str(address[0]) for *_, address in found]

    def has(self, address: str) -> bool:
        """Returns True if an interface of this machine has this IP address."""
        try:
            socket.create_server((address, 0), family=_family(address)).close()
        except OSError:
            return False
        return True

    def source(self, address: str) -> str | None:
        """Returns this machine's source IP address for packets to `address`, or None without a route."""
        try:
            with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
                # Only looks up the route; nothing is sent.
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            return None


def reachable(own: str, others: Sequence[str], say: Callable[[str], object], system: System | None = None) -> str:
    """Returns the IP address at which this machine listens for the other tasks.

    Args:
      own: this machine's name or address in the cluster.
      others: names or addresses of the other tasks' machines.
      say: writes a line to the log if the result is no address of `own`.
      system: queries to the operating system.

    Raises:
      OSError: this machine has no address that the others can reach.
    """
    system = system or System()
    given = system.resolve(own)
    remote = [address for host in others if host != own for address in system.resolve(host)[:1]]
    remote = [address for address in remote if not ipaddress.ip_address(address).is_loopback]
    for address in given:
        if system.has(address) and not (remote and ipaddress.ip_address(address).is_loopback):
            return address
    for address in remote:
        source = system.source(address)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            say(
                f"{own} is {', '.join(given) or 'unknown'} on this machine, where other machines can't reach it; "
                f"listening at {source}, from where {address} is reached"
            )
            return source
    raise OSError(
        f"no interface of this machine has an address at which the other workers reach it; give it in TF_CONFIG a "
        f"name or an address of its own. Received: {own} ({', '.join(given) or 'unknown'})"
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
