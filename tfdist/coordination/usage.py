# SPDX-License-Identifier: Apache-2.0
"""Bytes sent and received, CPU time and memory of this process, sampled by a thread every few seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct
import threading
import time
from typing import NamedTuple

from tfdist import _sockets

# Offsets in Linux' struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received (4.1), tcpi_bytes_sent (4.19).
_ACKED, _RECEIVED, _SENT, _SIZE = 120, 128, 200, 208
# Request to a server process for its counters.
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
      memory_bytes: resident memory; 0 where there is no /proc.
      started_at: Unix time at which the sampling began. A task that was started again has another one.
      restarts: number of times that a launcher has started the job, or this task, again.
    """

    bytes_sent: int
    bytes_received: int
    cpu_secs: float
    memory_bytes: int
    started_at: float
    restarts: int = 0

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
        return Usage(*json.loads(text))


class Bytes(NamedTuple):
    """Payload of TCP: headers of TCP and IP are left out, retransmitted bytes are not."""

    sent: int
    received: int


def by_socket() -> dict[str, Bytes]:
    """Returns the bytes of each open TCP socket of this process by its inode, as the kernel counts them. Linux only."""
    found: dict[str, Bytes] = {}
    for link, connection in _sockets.connections():
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        if len(information) >= _RECEIVED + 8:
            sent = struct.unpack_from("Q", information, _SENT if len(information) >= _SIZE else _ACKED)[0]
            found[link] = Bytes(sent, struct.unpack_from("Q", information, _RECEIVED)[0])
    return found


class Sampler:
    """Samples this process. Any thread may call it.

    A socket's counters vanish with the socket. So the last ones of each are kept, and only what a connection carried
    between its last sample and its end is lost.

    Args:
      from_now: False to count what open sockets have carried before.
    """

    def __init__(self, from_now: bool = True) -> None:
        self._lock = threading.Lock()
        # By inode.
        self._last: dict[str, Bytes] = {}
        self._closed = self._before = Bytes(0, 0)
        self._started_at = time.time()
        if from_now:
            self._before = self._bytes()

    def sample(self) -> Usage:
        """Returns the counters now."""
        bytes_so_far = self._bytes()
        return Usage(*bytes_so_far, time.process_time(), memory_bytes(), self._started_at, _restarts())

    def start(self, every_secs: float = EVERY_SECS) -> Sampler:
        """Samples in a thread until the process ends, so that sockets that are closed meanwhile are counted."""
        threading.Thread(target=self._run, args=(every_secs,), name="tfdist usage", daemon=True).start()
        return self

    def _run(self, every_secs: float) -> None:
        while True:
            time.sleep(every_secs)
            self._bytes()

    def _bytes(self) -> Bytes:
        with self._lock:
            now = by_socket()
            for inode, last in self._last.items():
                current = now.get(inode)
                # An inode may be used again, by a socket that begins at 0.
                if current is None or current.sent < last.sent or current.received < last.received:
                    self._closed = Bytes(self._closed.sent + last.sent, self._closed.received + last.received)
            self._last = now
            sent, received = map(sum, zip(self._closed, *now.values(), strict=True))
            return Bytes(sent - self._before.sent, received - self._before.received)


def _restarts() -> int:
    attempt, restart = os.environ.get(_ATTEMPT, ""), os.environ.get(_RESTART, "")
    return max(0, int(attempt) - 1 if attempt.isdecimal() else 0) + (int(restart) if restart.isdecimal() else 0)


def memory_bytes() -> int:
    """Returns the resident memory of this process; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - the shortest way, many times
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
