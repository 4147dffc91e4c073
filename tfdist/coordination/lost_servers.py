# SPDX-License-Identifier: Apache-2.0
"""Finds parameter servers that no longer accept connections.

An error that reaches the chief in a step names a connection at best, and often not whose. A server whose process has
ended refuses connections at once, so all are probed at the same time.
"""

from __future__ import annotations

import concurrent.futures
import errno
import time
from collections.abc import Mapping

from tfdist import _sockets

# Longest wait for an answer: a live host accepts or refuses sooner, a host without power takes the whole time.
_ANSWER_SECS = 5.0
_ENDING_SECS = 1.0
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def describe_lost(servers: Mapping[int, str], is_suspected: bool = False) -> str | None:
    """Returns a sentence about the parameter servers that are lost, or None if none is.

    Args:
      servers: the address of each, "host:port", by index.
      is_suspected: True if a connection to one has ended. Servers that answer are then tried once more, after a second:
        a process that ends closes its connections and its port one after the other.
    """
    if not servers:
        return None
    found = _described(servers)
    if found is None and is_suspected:
        time.sleep(_ENDING_SECS)
        found = _described(servers)
    return found


def _described(servers: Mapping[int, str]) -> str | None:
    pool = concurrent.futures.ThreadPoolExecutor(min(32, len(servers)), "tfdist-lost-servers")
    try:
        found = list(pool.map(_is_lost, servers.values()))
    finally:
        pool.shutdown(wait=False)
    lost = [f"ps:{index} ({servers[index]})" for index, is_lost in zip(servers, found, strict=True) if is_lost]
    if not lost:
        return None
    gone = "is lost, and its variables with it" if len(lost) == 1 else "are lost, and their variables with them"
    return (
        f"{', '.join(lost)} {gone}; start the whole job again with tfdist.callbacks.Resume, "
        "as tfdist launch --max_restarts does"
    )


def _is_lost(address: str) -> bool:
    """Returns True if no process accepts connections; False if it can't be said, as where a name is not resolved."""
    error = _sockets.connection_error(address, _ANSWER_SECS)
    return isinstance(error, ConnectionRefusedError | TimeoutError) or getattr(error, "errno", None) in _UNREACHABLE


def is_refused(address: str, timeout_secs: float) -> bool:
    """Returns True if the host is there, and no process of it accepts connections at a valid address."""
    return isinstance(_sockets.connection_error(address, timeout_secs), ConnectionRefusedError)
