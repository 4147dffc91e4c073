# SPDX-License-Identifier: Apache-2.0
"""Bytes on the links of parameter servers, and shares of the time in which these are full: the kernel's counters."""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "support"))
import namespaces

_EVERY_SECS = 0.25
# Share of its bandwidth from which on a link counts as full.
_FULL = 0.8

# Time, (bytes sent, bytes received) of each namespace, and busy seconds of all cores.
_Sample = tuple[float, list[tuple[int, int]], float]


class Watch:
    """Reads the counters of all links four times a second, from `with` to its end.

    Args:
      spaces: the namespaces of `namespaces.joined`.
      servers: indices of those of the parameter servers.
      mbits: megabits per second of each link.
    """

    def __init__(self, spaces: Sequence[str], servers: Sequence[int], mbits: int) -> None:
        self._spaces, self._servers = spaces, servers
        self._bytes_per_sec = 0.125e6 * mbits
        self._samples: list[_Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_SECS):
            self._samples.append((time.time(), namespaces.counters(self._spaces), _busy_secs()))

    def during(self, began: float, ended: float, steps: int) -> dict[str, Any]:
        """Returns the use of the links from one time, in seconds since 1970, to another, in which `steps` were made.

        Bytes are of a step. Shares of the time are for each server's link, and then averaged over the servers: only
        the direction from it is full, only that to it, both, or neither.
        """
        samples = [each for each in self._samples if began <= each[0] <= ended]
        secs = samples[-1][0] - samples[0][0]
        shares = dict.fromkeys(("from", "to", "both", "neither"), 0.0)
        for before, after in itertools.pairwise(samples):
            most = _FULL * self._bytes_per_sec * (after[0] - before[0])
            for server in self._servers:
                out, into = (after[1][server][way] - before[1][server][way] >= most for way in (0, 1))
                name = "both" if out and into else "from" if out else "to" if into else "neither"
                shares[name] += (after[0] - before[0]) / secs / len(self._servers)
        # The samples begin and end a little within the time.
        of_a_step = (ended - began) / secs / steps
        first, last = samples[0][1], samples[-1][1]
        sent, received = (sum(last[each][way] - first[each][way] for each in self._servers) for way in (0, 1))
        chief = last[-1][0] - first[-1][0]
        return {
            "from_servers_per_step": sent * of_a_step,
            "to_servers_per_step": received * of_a_step,
            "from_chief_per_step": chief * of_a_step,
            "full": shares,
            "busy_cores": (samples[-1][2] - samples[0][2]) / secs,
        }


def _busy_secs() -> float:
    # Of all cores: user, nice, system, idle, waiting for disks, interrupts (two), taken by other machines.
    line = pathlib.Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, *interrupts = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
