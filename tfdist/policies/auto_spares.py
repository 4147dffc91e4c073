# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of spares from how long gradients have been taking."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tfdist.policies import order_statistics

WINDOW = 32
_MIN_SAMPLES = 8
_EVERY_UPDATES = WINDOW // 4
# A choice that is no better than this is not worth a change.
_HYSTERESIS = 1.05


class AutoSpares:
    """Maximises the rate at which gradients enter updates, N / E[X(N:n)], by what each replica took of late.

    Each replica is taken to draw from its own last `WINDOW` durations, late gradients included. If updates were made of
    N gradients, and the number of updates needed grew as 1/N, this would be the quickest training (Chen et al. 2016,
    arXiv 1604.00981, section 3.2).

    Args:
      total_num_replicas: n.
      max_spares: the cap.
    """

    def __init__(self, total_num_replicas: int, max_spares: int) -> None:
        self._total = total_num_replicas
        self._max_spares = max_spares
        self._durations: list[collections.deque[float]] = [
            collections.deque(maxlen=WINDOW) for _ in range(total_num_replicas)
        ]
        self._updates = 0

    def measured(self, replica: int, secs: float) -> None:
        """A gradient of `replica` took so long from start to arrival."""
        self._durations[replica].append(secs)

    def forget(self, replica: int) -> None:
        """`replica` is another than before."""
        self._durations[replica].clear()

    def updated(self, spares: int, alive: Iterable[int]) -> tuple[int, str]:
        """An update was made: reconsiders the number of spares, if it is time to.

        Args:
          spares: the number so far; at least n - N of the replicas are alive.
          alive: the replicas that are.

        Returns:
          The number from now on, and the reason in words if it is another one.
        """
        self._updates += 1
        windows = [list(self._durations[replica]) for replica in alive]
        if self._updates < _EVERY_UPDATES or min(map(len, windows)) < _MIN_SAMPLES:
            return spares, ""
        self._updates = 0
        secs = order_statistics.expected_arrivals(windows)
        return self._choose(spares, {self._total - count: secs[count - 1] for count in range(1, len(windows) + 1)})

    def _choose(self, spares: int, secs: dict[int, float]) -> tuple[int, str]:
        """Compares the choices, given the expected seconds per update for each number of spares."""

        def rate(choice: int) -> float:
            # No time at all, on a clock that is too coarse, is nothing to choose by.
            return (self._total - choice) / secs[choice] if secs[choice] > 0.0 else 0.0

        best = max(sorted(choice for choice in secs if choice <= self._max_spares), key=rate)
        if secs[spares] <= 0.0 or rate(best) <= _HYSTERESIS * rate(spares):
            return spares, ""
        return best, (
            f"{self._total - best} gradients expected every {secs[best]:.3g} s instead of {self._total - spares} every "
            f"{secs[spares]:.3g} s"
        )

    def lost(self, spares: int, lost: Iterable[int]) -> tuple[int, str]:
        """A replica was lost: more spares if no update could be made otherwise, and the cap allows it.

        Returns:
          As for `updated`.
        """
        gone = sorted(lost)
        if not spares < len(gone) <= self._max_spares:
            return spares, ""
        return len(gone), f"lost {'replica' if len(gone) == 1 else 'replicas'} {', '.join(map(str, gone))}"
