# SPDX-License-Identifier: Apache-2.0
"""How asynchronous training is kept in hand: what an update is made of, and what its gradients' age does to them.

Each of these says one thing; `tfdist.policies.asynchronous` makes of several of them what decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from tfdist.policies import base

Rule = Callable[[int], float]


class SoftSync(base.Policy):
    """Makes an update from any S gradients, as soon as they are there, stale or not.

    The aggregate is their mean, so one update counts as one batch: each batch is cut into S parts of about equal size,
    and each gradient is of one part. A fast worker may give several gradients to one update.

    Source: Zhang, Gupta, Lian and Liu 2015, Staleness-aware Async-SGD, arXiv 1511.05950, section 3.1. With lambda
    workers, S = lambda / n makes it their n-softsync, of mean staleness about n; S=1 is asynchronous training.

    Args:
      updates: S, how many gradients an update is made of, from 1 to the number of workers.

    Raises:
      ValueError: there is no such number.
    """

    def __init__(self, updates: int) -> None:
        super().__init__()
        if not base.is_count(updates, at_least=1):
            raise ValueError(
                "SoftSync(updates=...): how many gradients is an update made of? Give a whole number from 1 on. "
                f"Received: updates={updates!r}"
            )
        self.updates = updates

    def __repr__(self) -> str:
        return f"SoftSync(updates={self.updates})"

    def _check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        if self.updates > total_num_replicas:
            raise ValueError(
                f"{self!r} wants more gradients for an update than {strategy} has workers; use updates <= "
                f"{total_num_replicas}. Received: updates={self.updates}, total_num_replicas={total_num_replicas}"
            )


class StalenessScaling(base.Policy):
    """Multiplies each gradient by a weight that depends on its staleness (global step - local step).

    Weights don't enter the mean's denominator: an update from gradients that are all stale is a smaller step.

    Source: Zhang, Gupta, Lian and Liu 2015, arXiv 1511.05950, equation 6: alpha0 / staleness, for each gradient of an
    update by itself; staleness 0 counts as 1.

    Args:
      rule: "inverse" for 1 / max(1, staleness), or a function from the staleness to a weight of 0 or more.

    Raises:
      ValueError: it is neither, or the function gives NaN, an infinite or a negative number for a small staleness;
        later ones are checked when they are used.
    """

    def __init__(self, rule: Literal["inverse"] | Rule = "inverse") -> None:
        super().__init__()
        if rule != "inverse" and not callable(rule):
            raise ValueError(
                'StalenessScaling(rule=...): give "inverse" or a function from the staleness to a weight. '
                f"Received: rule={rule!r}"
            )
        self._rule: Any = rule
        for staleness in range(3):
            self.weight(staleness)

    def __repr__(self) -> str:
        name = repr(self._rule) if isinstance(self._rule, str) else getattr(self._rule, "__name__", repr(self._rule))
        return f"StalenessScaling(rule={name})"

    def weight(self, staleness: int) -> float:
        """What a gradient of this staleness is multiplied by.

        Raises:
          ValueError: the user's rule gives no such number.
        """
        if self._rule == "inverse":
            return 1.0 / max(1, staleness)
        given = self._rule(staleness)
        try:
            weight = float(given)
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"{self!r}: the rule must return a finite weight of 0 or more. Received: {given!r} for a staleness of "
                f"{staleness}"
            )
        return weight


class DropStale(base.Policy):
    """Drops each gradient that is older than m updates when its turn comes. What it was computed from is lost.

    Args:
      max_staleness: m, the staleness (global step - local step) of the oldest gradient that still counts; 0 or more.

    Raises:
      ValueError: there is no such number.
    """

    def __init__(self, max_staleness: int) -> None:
        super().__init__()
        if not base.is_count(max_staleness, at_least=0):
            raise ValueError(
                "DropStale(max_staleness=...): how old may a gradient be? Give a whole number from 0 on. "
                f"Received: max_staleness={max_staleness!r}"
            )
        self.max_staleness = max_staleness

    def __repr__(self) -> str:
        return f"DropStale(max_staleness={self.max_staleness})"


class BoundedStaleness(base.Policy):
    """Holds fast workers back so that no gradient is ever older than s updates when it is applied. Drops none.

    A worker may start a gradient, and an update may be made, only if every gradient that is under way can still be
    applied in time after it. How long updates were held back is in `Report.wait_secs`.

    Source: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server. Theirs
    bounds the distance between workers' clocks; here it is the staleness itself (global step - local step).

    Args:
      bound: s, 1 or more. At most (s + 1) * S gradients are under way at once, where S is that of `SoftSync`, or 1:
        with fewer than that many workers for s + 1, the bound costs nothing unless one is slow.

    Raises:
      ValueError: there is no such number.
    """

    def __init__(self, bound: int) -> None:
        super().__init__()
        if not base.is_count(bound, at_least=1):
            raise ValueError(
                "BoundedStaleness(bound=...): how old may a gradient be at most? Give a whole number from 1 on; for 0 "
                f"train synchronously, with tfdist.BackupWorkers(spares=0). Received: bound={bound!r}"
            )
        self.bound = bound

    def __repr__(self) -> str:
        return f"BoundedStaleness(bound={self.bound})"
