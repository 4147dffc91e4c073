# SPDX-License-Identifier: Apache-2.0
"""Reservation of free TCP ports of this machine until the tasks listen at them. No TensorFlow import."""

from __future__ import annotations

import socket
import sys


class PortReservation:
    """Free ports, reserved against other programs.

    Each port is held by a socket that is bound but doesn't listen. On Linux a gRPC server of TensorFlow can still bind
    such a port (both sides set SO_REUSEADDR), while the kernel assigns it to no program that asks for *any* port, to
    listen or to connect. So the reservation can stay while the tasks start, and two launchers never use the same port.

    Args:
      count: number of ports.

    Raises:
      OSError: the machine has no free port left.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                self._sockets.append(_bound_socket())
            self.ports: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)
        except OSError:
            self.release()
            raise
        if not sys.platform.startswith("linux"):
            self.release()  # Other systems can't bind a bound port again, so the port is free until the task starts.

    def release(self) -> None:
        """Releases the ports; may be called again."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _bound_socket() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # On all interfaces, as TensorFlow's server: a port in use on one of them can't be used.
        held.bind(("", 0))
    except OSError:
        held.close()
        raise
    return held
