# SPDX-License-Identifier: Apache-2.0
"""Time for which a policy holds replicas back, from one update to the next (`Update.held_secs`)."""

from __future__ import annotations


class HeldSecs:
    """Adds up, for each replica, the time in which it had delivered a gradient and had not started the next one."""

    def __init__(self) -> None:
        # Replica -> arrival time of its last gradient, while the replica is idle.
        self._idle_since: dict[int, float] = {}
        # Replica -> idle seconds since the last update.
        self._held: dict[int, float] = {}

    def opened(self, time: float) -> None:
        """Notes that Keras asked for an update. Idle time before doesn't count: no update was wanted."""
        self._idle_since = dict.fromkeys(self._idle_since, time)

    def delivered(self, replica: int, time: float) -> None:
        """Notes that `replica` has delivered a gradient and is idle."""
        self._idle_since[replica] = time

    def started(self, replica: int, time: float) -> None:
        """Notes that `replica` starts a gradient."""
        self._add(replica, time)
        self._idle_since.pop(replica, None)

    def forget(self, replica: int) -> None:
        """Notes that the gradient of `replica` was withdrawn."""
        self._idle_since.pop(replica, None)

    def updated(self, time: float, total_num_replicas: int) -> tuple[float, ...]:
        """Returns the seconds of each replica since the previous update, and begins anew."""
        for replica in self._idle_since:
            self._add(replica, time)
        held, self._held = self._held, {}
        return tuple(held.get(replica, 0.0) for replica in range(total_num_replicas))

    def _add(self, replica: int, time: float) -> None:
        since = self._idle_since.get(replica, time)
        self._idle_since[replica] = time
        self._held[replica] = self._held.get(replica, 0.0) + time - since


class NoHeldSecs(HeldSecs):
    """Measures nothing, so that no event takes time per idle replica."""

    def opened(self, time: float) -> None:
        """Does nothing."""

    def delivered(self, replica: int, time: float) -> None:
        """Does nothing."""

    def started(self, replica: int, time: float) -> None:
        """Does nothing."""

    def updated(self, time: float, total_num_replicas: int) -> tuple[float, ...]:
        """Returns an empty tuple."""
        return ()
