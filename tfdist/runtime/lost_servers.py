# SPDX-License-Identifier: Apache-2.0
"""Finds parameter servers that no longer accept connections.

An error that reaches the chief in a step names a connection at best, and often not whose. A server whose
process has ended refuses connections at once, so it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.runtime import rendezvous

# A host that is there accepts or refuses sooner; one without power takes all of it.
_ANSWER_SECS = 2.0


def said(servers: Mapping[int, str]) -> str | None:
    """Returns what is to be said of lost parameter servers, or None if all accept connections.

    Args:
      servers: the address of each, "host:port", by index.
    """
    lost = [
        f"ps:{index} ({address})"
        for index, address in servers.items()
        if not rendezvous.answers(address, timeout_secs=_ANSWER_SECS)
    ]
    if not lost:
        return None
    gone = "is lost, and its variables with it" if len(lost) == 1 else "are lost, and their variables with them"
    return (
        f"{', '.join(lost)} {gone}; start the whole job again with tfdist.callbacks.Resume, "
        "as tfdist launch --max_restarts does"
    )
