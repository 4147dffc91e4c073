# SPDX-License-Identifier: Apache-2.0
"""Finds processes that no longer accept connections: parameter servers, and workers.

An error that reaches the chief in a step names a connection at best, and often not whose. A server whose process has
ended refuses connections at once, so all are probed at the same time.
"""

from __future__ import annotations

import concurrent.futures
import errno
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist import _sockets

# Longest wait for an answer: a live host accepts or refuses sooner, a host without power takes the whole time.
_ANSWER_SECS = 5.0
# The same for an address that only counts if it refuses.
_PROBE_SECS = 0.2
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
    lost = [f"ps:{index} ({servers[index]})" for index in _found(servers, _is_lost)]
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


def refused(addresses: Mapping[str, str]) -> list[str]:
    """Returns the names whose hosts are there, and have no process that accepts connections at a valid address."""
    error_of = lambda address: _sockets.connection_error(address, _PROBE_SECS)  # noqa: E731
    return _found(addresses, lambda address: isinstance(error_of(address), ConnectionRefusedError))


def _found(addresses: Mapping[Any, str], is_lost: Callable[[str], bool]) -> list[Any]:
    """Returns the names for whose addresses the function, called for all at the same time, returns True."""
    pool = concurrent.futures.ThreadPoolExecutor(min(32, len(addresses) or 1), "tfdist-lost-servers")
    try:
        return [name for name, found in zip(addresses, pool.map(is_lost, addresses.values()), strict=True) if found]
    finally:
        pool.shutdown(wait=False)
