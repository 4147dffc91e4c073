# SPDX-License-Identifier: Apache-2.0
"""Backup workers: synchronous training from the first N of N + b gradients."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from tfdist import _checks
from tfdist.policies import base

_DRAWS = 1024
_MIN_SAMPLES = 8
_EVERY_UPDATES = 8
# Minimum gain in the rate of gradients for a change.
_HYSTERESIS = 1.05


def expected_arrivals(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns the expected time of the k-th arrival if each replica draws its duration from its own samples.

    A mean over `_DRAWS` random orders of each replica's samples, so that each sample is drawn equally often. The
    standard error is about 1 % for the last arrivals of a hundred replicas.

    Args:
      samples: for each of the n replicas, at least one duration >= 0, all in the same unit.

    Returns:
      E[X(1:n)] to E[X(n:n)], in the unit of the samples; the same in each call.
    """
    generator = random.Random(0)
    drawn = [[own[draw * len(own) // _DRAWS] for draw in range(_DRAWS)] for own in samples]
    for each in drawn:
        generator.shuffle(each)
    arrivals = map(sorted, zip(*drawn, strict=True))
    return [statistics.fmean(times) for times in zip(*arrivals, strict=True)]


def best_spares(
    durations: Sequence[Sequence[float]], total_num_replicas: int, max_spares: int, spares: int = 0
) -> tuple[int, dict[int, float]]:
    """Returns the number of spares that maximises the rate of aggregated gradients, N / E[X(N:n)].

    The model assumes that each replica draws its next duration from its own last durations, late gradients included.
    This N trains fastest if the number of updates that training needs is proportional to 1/N (Chen et al. 2016, arXiv
    1604.00981, section 3.2).

    Args:
      durations: for each living replica, those of its last gradients, from start to arrival.
      total_num_replicas: n, living or not.
      max_spares: the most spares to choose.
      spares: current number, which is returned unless another one is better by more than 5 %.

    Returns:
      The number, and the expected seconds of an update by number of spares.
    """
    secs = {total_num_replicas - count: each for count, each in enumerate(expected_arrivals(durations), 1)}

    def rate(choice: int) -> float:
        # A coarse clock may measure 0 s, from which no rate follows.
        return (total_num_replicas - choice) / secs[choice] if secs[choice] > 0.0 else 0.0

    best = max(sorted(choice for choice in secs if choice <= max_spares), key=rate)
    return (best if 0.0 < _HYSTERESIS * rate(spares) < rate(best) else spares), secs


class BackupWorkers(base.Aggregation):
    """Makes each update from the first N of n = N + b gradients of its step, and drops later ones.

    Training stays synchronous: every gradient of an update was computed from the variables of that update's step, and
    each replica contributes at most one. A late replica continues with the step that is current then. The aggregate is
    the mean of the N gradients.

    With `spares="auto"`, b starts at 0 and is chosen every 8 updates, to maximise N / E[time of the N-th arrival].
    The choice uses the last 32 durations of each living replica, and needs at least 8 of each. It changes b only for a
    gain of more than 5 %, and between updates. One exception: b rises at once when so many replicas are lost that no
    update would be possible.

    Source: Chen, Pan, Monga, Bengio and Jozefowicz 2016, Revisiting Distributed Synchronous SGD, arXiv 1604.00981,
    algorithms 3 and 4. In TensorFlow's sync_replicas_optimizer, N is called `replicas_to_aggregate` and n is
    `total_num_replicas`.

    Args:
      spares: b, the number of replicas that no update waits for, from 0 to n - 1; or "auto".
      max_spares: the most that "auto" may choose, from 1 to n - 1; (n - 1) // 2 if not given.

    Raises:
      ValueError: an argument is out of its range.
    """

    def __init__(self, spares: int | Literal["auto"], *, max_spares: int | None = None) -> None:
        super().__init__()
        if spares != "auto" and not _checks.is_count(spares, at_least=0):
            raise ValueError(
                f'BackupWorkers(spares=...) must be an integer of at least 0, or "auto". Received: spares={spares!r}'
            )
        if max_spares is not None and spares != "auto":
            raise ValueError(
                f'BackupWorkers(max_spares=...) is for spares="auto" only. Received: spares={spares!r}, '
                f"max_spares={max_spares!r}"
            )
        if max_spares is not None:
            _checks.check_count("BackupWorkers", "max_spares", max_spares)
        self._asked: int | Literal["auto"] = spares
        self._max_spares = max_spares
        self._spares = 0 if spares == "auto" else spares
        self._updates_since_choice = 0

    def __repr__(self) -> str:
        most = "" if self._max_spares is None else f", max_spares={self._max_spares}"
        return f"{type(self).__name__}(spares={self._asked!r}{most})"

    def begin(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.begin`."""
        super().begin(total_num_replicas, strategy)
        self._count_anew()
        self._most = (total_num_replicas - 1) // 2 if self._max_spares is None else self._max_spares

    # Kept: each gradient asks for it.
    @functools.cached_property
    def replicas_to_aggregate(self) -> int:
        """N, the number of gradients that the current step's update needs."""
        taking_part = self._total if self._limit is None else min(self._limit, self._total)
        return max(1, taking_part - self._spares)

    def _count_anew(self) -> None:
        vars(self).pop("replicas_to_aggregate", None)

    def limit(self, count: int) -> None:
        """See `Aggregation.limit`."""
        super().limit(count)
        self._count_anew()

    @property
    def spares(self) -> int:
        """b, the number of replicas that the current step's update does not wait for."""
        return self._spares

    def state(self) -> dict[str, Any]:
        """See `Policy.state`: the number of spares. Measured durations are left out; a restart may change them."""
        return {"spares": self._spares}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Policy.restore`. There may be fewer replicas than there were."""
        if self._asked == "auto":
            self._spares = min(state["spares"], self._total - 1)
            self._count_anew()

    def check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.check_replicas`."""
        received = f"Received: spares={self._asked!r}, total_num_replicas={total_num_replicas}"
        if total_num_replicas == 1 and self._asked:
            raise ValueError(
                f"{self!r} needs a second replica, and {strategy} has only one; use spares=0 or no policy. {received}"
            )
        name = "max_spares" if self._max_spares is not None else "spares"
        if max(self._spares, self._max_spares or 0) >= total_num_replicas:
            raise ValueError(
                f"{self!r} leaves no replica of {total_num_replicas} to aggregate under {strategy}; "
                f"use {name} <= {total_num_replicas - 1}. {received}"
            )

    def stepped(self) -> None:
        """See `Aggregation.stepped`."""
        if self._asked != "auto":
            return
        self._updates_since_choice += 1
        if len(self._lost) > min(self._spares, self._most):
            return  # No update is possible without those, but for one of a warmup phase.
        durations = [self.durations[replica] for replica in self.alive()]
        if self._updates_since_choice < _EVERY_UPDATES or min(map(len, durations)) < _MIN_SAMPLES:
            return
        self._updates_since_choice = 0
        spares, secs = best_spares(durations, self._total, self._most, self._spares)
        self._change(
            spares,
            f"{self._total - spares} gradients expected every {secs[spares]:.3g} s instead of "
            f"{self._total - self._spares} every {secs[self._spares]:.3g} s",
        )

    def shrunk(self) -> None:
        """See `Aggregation.shrunk`."""
        # No update is possible otherwise.
        if self._asked == "auto" and self._spares < len(self._lost) <= self._most:
            lost = ", ".join(map(str, sorted(self._lost)))
            self._change(len(self._lost), f"lost {'replica' if len(self._lost) == 1 else 'replicas'} {lost}")

    def _change(self, spares: int, reason: str) -> None:
        if spares != self._spares:
            self.changed(f"spares {self._spares} -> {spares} of {self._total} replicas: {reason}")
            self._spares = spares
            self._count_anew()
