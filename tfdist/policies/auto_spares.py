# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of backup workers (spares) from measured gradient durations."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tfdist.policies import order_statistics

WINDOW = 32
_MIN_SAMPLES = 8
_EVERY_UPDATES = WINDOW // 4
# Minimum gain in the rate of gradients for a change.
_HYSTERESIS = 1.05


class AutoSpares:
    """Maximises the rate of aggregated gradients, N / E[X(N:n)], from the recent durations of each replica.

    The model assumes that each replica draws its next duration from its own last `WINDOW` durations, late gradients
    included. This N trains fastest if the number of updates that training needs is proportional to 1/N (Chen et al.
    2016, arXiv 1604.00981, section 3.2).

    Args:
      total_num_replicas: n, the number of replicas.
      max_spares: the most spares to choose.
    """

    def __init__(self, total_num_replicas: int, max_spares: int) -> None:
        self._total = total_num_replicas
        self._max_spares = max_spares
        self._durations: list[collections.deque[float]] = [
            collections.deque(maxlen=WINDOW) for _ in range(total_num_replicas)
        ]
        self._updates = 0

    def measured(self, replica: int, secs: float) -> None:
        """Records the duration of a gradient of `replica`, from start to arrival."""
        self._durations[replica].append(secs)

    def forget(self, replica: int) -> None:
        """Forgets the durations of `replica`, which was replaced."""
        self._durations[replica].clear()

    def updated(self, spares: int, alive: Iterable[int]) -> tuple[int, str]:
        """Chooses the number of spares again after an update, once in `_EVERY_UPDATES` updates.

        Args:
          spares: the current number; at least n - `spares` replicas are alive.
          alive: the living replicas.

        Returns:
          The new number, and the reason for a change in words ("" without a change).
        """
        self._updates += 1
        windows = [list(self._durations[replica]) for replica in alive]
        if self._updates < _EVERY_UPDATES or min(map(len, windows)) < _MIN_SAMPLES:
            return spares, ""
        self._updates = 0
        secs = order_statistics.expected_arrivals(windows)
        return self._choose(spares, {self._total - count: secs[count - 1] for count in range(1, len(windows) + 1)})

    def _choose(self, spares: int, secs: dict[int, float]) -> tuple[int, str]:
        """Chooses among numbers of spares; `secs` has the expected seconds per update of each."""

        def rate(choice: int) -> float:
            # A coarse clock may measure 0 s, from which no rate follows.
            return (self._total - choice) / secs[choice] if secs[choice] > 0.0 else 0.0

        best = max(sorted(choice for choice in secs if choice <= self._max_spares), key=rate)
        if secs[spares] <= 0.0 or rate(best) <= _HYSTERESIS * rate(spares):
            return spares, ""
        return best, (
            f"{self._total - best} gradients expected every {secs[best]:.3g} s instead of {self._total - spares} every "
            f"{secs[spares]:.3g} s"
        )

    def lost(self, spares: int, lost: Iterable[int]) -> tuple[int, str]:
        """Raises the number of spares after a loss, if no update is possible otherwise and `max_spares` allows it.

        Returns:
          As for `updated`.
        """
        gone = sorted(lost)
        if not spares < len(gone) <= self._max_spares:
            return spares, ""
        return len(gone), f"lost {'replica' if len(gone) == 1 else 'replicas'} {', '.join(map(str, gone))}"
