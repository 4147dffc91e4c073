# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports of this machine, kept free until the task that was given one listens on it. No TensorFlow import."""

from __future__ import annotations

import socket
import sys


class PortReservation:
    """Free ports, kept away from other programs that ask for one.

    Each port is held by a socket that is bound and does not listen. On Linux a gRPC server of TensorFlow can bind such
    a port all the same (both sides set SO_REUSEADDR), while the kernel gives it to nobody who asks for *any* port, be
    it to listen or to connect. So the holder needs not let go before its tasks start, and two launchers never collide.

    Args:
      count: how many ports.

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
            self.release()  # Elsewhere a bound port can't be bound again, so the gap until the task starts remains.

    def release(self) -> None:
        """Lets go of the ports; may be called again."""
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
        # On every interface, as TensorFlow's server will be: a port in use on one of them would be no good.
        held.bind(("", 0))
    except OSError:
        held.close()
        raise
    return held
