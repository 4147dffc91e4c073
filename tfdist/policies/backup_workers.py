# SPDX-License-Identifier: Apache-2.0
"""Backup workers: synchronous training from the first N of N + b gradients."""

from __future__ import annotations

import cmath
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tfdist import _checks
from tfdist.policies import base

# Expected arrival time of the k-th of n replicas, computed exactly from measured durations in plain Python.


def expected_arrivals(samples: Sequence[Sequence[float]]) -> list[float]:
    """Returns the expected time of the k-th arrival if each replica draws its duration from its own samples.

    With F_i the empirical distribution function of replica i and S(x) the number of replicas that need no longer than x
    (Poisson-binomial, of probabilities F_i(x)),

        E[X(k:n)] = integral over x >= 0 of P(S(x) < k).

    If all replicas have the same m samples x_(1) <= x_(2) ..., this is the sum of x_(i) [I_(i/m)(k, n-k+1) -
    I_((i-1)/m)(k, n-k+1)]. I is the incomplete beta function. No random numbers are drawn.

    The distribution of S follows from its characteristic function: the product over i of (1 - F_i + F_i w) at the roots
    of unity w. Source: Hong 2013, On computing the distribution function for the Poisson binomial distribution,
    equation 7. The inverse transform is linear, so it is done once, after integrating over x. This takes about n/2
    steps per sample.

    Args:
      samples: for each of the n replicas, at least one duration >= 0, all in the same unit.

    Returns:
      E[X(1:n)] to E[X(n:n)], in the unit of the samples; the error is at most about 1e-10 of the longest duration.

    Raises:
      ValueError: there is no replica, or a replica has no samples.
    """
    if not samples or not all(samples):
        raise ValueError(f"expected_arrivals(samples=...): each replica needs a sample. Received: {samples!r}")
    # Steps of the distribution functions in the order of time: from j/m to (j+1)/m, encoded as one number for (m, j).
    sizes = sorted({len(own) for own in samples})
    codes = dict(zip(sizes, itertools.accumulate(sizes, initial=0), strict=False))
    ends = sorted((secs, codes[len(own)] + j) for own in samples for j, secs in enumerate(sorted(own)))
    times = [secs for secs, _ in ends]
    steps = [step for _, step in ends]
    gaps = list(map(operator.sub, times, [0.0, *times]))
    # An odd number of roots of unity, more than the n + 1 values of S if n is odd: at w = -1 a factor can be zero.
    roots = len(samples) + 1 + len(samples) % 2
    # One of each pair of conjugates; the root 1 is left out.
    half = range(1, roots // 2 + 1)
    transform = [_integral(gaps, steps, sizes, cmath.exp(2j * cmath.pi * root / roots)) for root in half]
    exactly = [_inverse(transform, count, times[-1], roots) for count in range(len(samples))]
    return list(itertools.accumulate(exactly))


def _integral(gaps: list[float], steps: list[int], sizes: list[int], w: complex) -> complex:
    """Integrates the characteristic function of S(x) at w over x."""
    # In logarithms: with hundreds of replicas the product is smaller than a float can be, and grows again later.
    increments: list[complex] = []
    for size in sizes:
        logs = [cmath.log(1 + j / size * (w - 1)) for j in range(size + 1)]
        increments += map(operator.sub, logs[1:], logs)
    logs = itertools.accumulate(map(increments.__getitem__, steps), initial=0j)
    return sum(map(operator.mul, gaps, map(cmath.exp, logs)), 0j)


def _inverse(transform: list[complex], count: int, total: float, roots: int) -> float:
    """Returns the integral over x of P(S(x) = count); `total` is the transform at 1."""
    turned = (value * cmath.exp(-2j * cmath.pi * root * count / roots) for root, value in enumerate(transform, 1))
    return (total + 2 * sum(value.real for value in turned)) / roots


# Chooses the number of backup workers (spares) from measured gradient durations.


_MIN_SAMPLES = 8
_EVERY_UPDATES = 8
# Minimum gain in the rate of gradients for a change.
_HYSTERESIS = 1.05


class AutoSpares:
    """Maximises the rate of aggregated gradients, N / E[X(N:n)], from the recent durations of each replica.

    The model assumes that each replica draws its next duration from its own last durations, late gradients included.
    This N trains fastest if the number of updates that training needs is proportional to 1/N (Chen et al. 2016, arXiv
    1604.00981, section 3.2).

    Args:
      total_num_replicas: n, the number of replicas.
      max_spares: the most spares to choose.
    """

    def __init__(self, total_num_replicas: int, max_spares: int) -> None:
        self._total = total_num_replicas
        self._max_spares = max_spares
        self._updates = 0

    def updated(self, spares: int, durations: Sequence[Sequence[float]]) -> tuple[int, str]:
        """Chooses the number of spares again after an update, once in `_EVERY_UPDATES` updates.

        Args:
          spares: the current number; at least n - `spares` replicas are alive.
          durations: for each living replica, those of its last gradients, from start to arrival.

        Returns:
          The new number, and the reason for a change in words ("" without a change).
        """
        self._updates += 1
        if self._updates < _EVERY_UPDATES or min(map(len, durations)) < _MIN_SAMPLES:
            return spares, ""
        self._updates = 0
        secs = expected_arrivals(durations)
        return self._choose(spares, {self._total - count: secs[count - 1] for count in range(1, len(durations) + 1)})

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
        if max_spares is not None and not _checks.is_count(max_spares, at_least=1):
            raise ValueError(
                f"BackupWorkers(max_spares=...) must be an integer of at least 1. Received: max_spares={max_spares!r}"
            )
        self._asked: int | Literal["auto"] = spares
        self._max_spares = max_spares
        self._spares = 0 if spares == "auto" else spares
        self._auto: AutoSpares | None = None

    def __repr__(self) -> str:
        most = "" if self._max_spares is None else f", max_spares={self._max_spares}"
        return f"BackupWorkers(spares={self._asked!r}{most})"

    def begin(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.begin`."""
        super().begin(total_num_replicas, strategy)
        if self._asked == "auto":
            most = (total_num_replicas - 1) // 2 if self._max_spares is None else self._max_spares
            self._auto = AutoSpares(total_num_replicas, most)

    @property
    def replicas_to_aggregate(self) -> int:
        """N, the number of gradients that the current step's update needs."""
        taking_part = self._total if self._limit is None else min(self._limit, self._total)
        return max(1, taking_part - self._spares)

    @property
    def spares(self) -> int:
        """b, the number of replicas that the current step's update does not wait for."""
        return self._spares

    def state(self) -> dict[str, Any]:
        """See `Policy.state`: the number of spares. Measured durations are left out; a restart may change them."""
        return {"spares": self._spares}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Policy.restore`. There may be fewer replicas than there were."""
        if self._auto is not None:
            self._spares = min(state["spares"], self._total - 1)

    def _check_replicas(self, total_num_replicas: int, strategy: str) -> None:
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

    def _stepped(self) -> None:
        if self._auto:
            durations = [self._durations[replica] for replica in self._alive()]
            self._change(*self._auto.updated(self._spares, durations))

    def _shrunk(self) -> None:
        if self._auto:
            self._change(*self._auto.lost(self._spares, self._lost))

    def _change(self, spares: int, reason: str) -> None:
        if spares != self._spares:
            self._changes.append(base.Change(f"spares {self._spares} -> {spares} of {self._total} replicas: {reason}"))
            self._spares = spares
