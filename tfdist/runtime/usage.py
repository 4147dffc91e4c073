# SPDX-License-Identifier: Apache-2.0
"""Bytes sent and received, CPU time and memory of this process, sampled by a thread every few seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence

from tfdist.runtime import memory, socket_bytes

# Request by which a server process is asked for its counters.
USAGE_REQUEST = b'{"method": "usage"}'
# Set by launchers: the number of the job's attempt, from 1, and of a task's restart within it, from 0.
_ATTEMPT, _RESTART = "TFDIST_ATTEMPT", "TFDIST_TASK_RESTART"

# A sample takes about a millisecond in a process of a hundred sockets.
EVERY_SECS = 2.0


@dataclasses.dataclass(frozen=True)
class Usage:
    """Counters of one process.

    Attributes:
      bytes_sent: bytes sent over TCP since the sampling began, as the kernel counts them; without headers.
      bytes_received: likewise.
      cpu_secs: CPU time of all its threads since its start.
      memory_bytes: resident memory; where there is no /proc, its highest value so far.
      started_at: Unix time at which the sampling began. A task that was started again has another one.
      restarts: number of times that a launcher has started the job, or this task, again.
      rooms: memory that the process may still take, as `memory.rooms` returns it.
    """

    bytes_sent: int
    bytes_received: int
    cpu_secs: float
    memory_bytes: int
    started_at: float
    restarts: int = 0
    rooms: Sequence[memory.Room] = ()

    def after(self, former: Usage) -> Usage:
        """Returns these counters, of a task that was started again, and those of its former process together."""
        return dataclasses.replace(
            self,
            bytes_sent=self.bytes_sent + former.bytes_sent,
            bytes_received=self.bytes_received + former.bytes_received,
            cpu_secs=self.cpu_secs + former.cpu_secs,
            restarts=max(self.restarts, former.restarts + 1),
        )

    def to_json(self) -> str:
        """Returns the counters as text."""
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def from_json(text: str | bytes) -> Usage:
        """Parses the result of `to_json`."""
        *counters, rooms = json.loads(text)
        return Usage(*counters, rooms=tuple(memory.Room(*each) for each in rooms))


class Sampler:
    """Samples this process. Any thread may call it.

    Args:
      from_now: False to count what open sockets have carried before.
    """

    def __init__(self, from_now: bool = True) -> None:
        self._bytes = socket_bytes.SocketBytes(from_now)
        self._started_at = time.time()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> Usage:
        """Returns the counters now."""
        sent, received = self._bytes.sample()
        counters = sent, received, time.process_time(), memory_bytes(), self._started_at, _restarts()
        return Usage(*counters, rooms=tuple(memory.rooms()))

    def start(self, every_secs: float = EVERY_SECS) -> Sampler:
        """Starts a thread that samples, so that sockets that are closed meanwhile are counted; may be called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(every_secs,), name="tfdist usage", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; may be called again."""
        self._ended.set()

    def _run(self, every_secs: float) -> None:
        while not self._ended.wait(every_secs):
            self._bytes.sample()


def _restarts() -> int:
    attempt, restart = os.environ.get(_ATTEMPT, ""), os.environ.get(_RESTART, "")
    return max(0, int(attempt) - 1 if attempt.isdecimal() else 0) + (int(restart) if restart.isdecimal() else 0)


def memory_bytes() -> int:
    """Returns the resident memory of this process; where there is no /proc, its highest value so far."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - the shortest way, many times
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else 1024 * highest
