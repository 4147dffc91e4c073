# SPDX-License-Identifier: Apache-2.0
"""Settings of asynchronous training: number of gradients per update, weights, limits and bounds by staleness.

Each class holds one setting. `tfdist.policies.asynchronous` combines them into the policy that decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from tfdist import _checks
from tfdist.policies import base

Rule = Callable[[int], float]


class SoftSync(base.Policy):
    """Makes an update from any S gradients as soon as they have arrived, stale or not.

    The aggregate is their mean. Each batch is split into S parts of about equal size. Each gradient is computed from
    one part, so an update counts as one batch. A fast worker may contribute several gradients to one update.

    Source: Zhang, Gupta, Lian and Liu 2015, Staleness-aware Async-SGD, arXiv 1511.05950, section 3.1. With lambda
    workers, S = lambda / n makes it their n-softsync, of mean staleness about n; S=1 is asynchronous training.

    Args:
      updates: S, the number of gradients in an update, from 1 to the number of workers.

    Raises:
      ValueError: `updates` is no positive integer.
    """

    def __init__(self, updates: int) -> None:
        super().__init__()
        if not _checks.is_count(updates, at_least=1):
            raise ValueError(
                "SoftSync(updates=...) must be an integer from 1 to the number of workers. "
                f"Received: updates={updates!r}"
            )
        self.updates = updates

    def __repr__(self) -> str:
        return f"{type(self).__name__}(updates={self.updates})"

    def check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.check_replicas`."""
        if self.updates > total_num_replicas:
            raise ValueError(
                f"{self!r} wants more gradients for an update than {strategy} has workers; use updates <= "
                f"{total_num_replicas}. Received: updates={self.updates}, total_num_replicas={total_num_replicas}"
            )


class StalenessScaling(base.Policy):
    """Multiplies each gradient by a weight that depends on its staleness (global step - local step).

    Weights don't enter the mean's denominator: an update from stale gradients only is a smaller step.

    Source: Zhang, Gupta, Lian and Liu 2015, arXiv 1511.05950, equation 6: a learning rate of alpha0 / staleness for
    each gradient by itself. Staleness 0 counts as 1.

    Args:
      rule: "inverse" for 1 / max(1, staleness), or a function from the staleness to a weight of 0 or more.

    Raises:
      ValueError: `rule` is neither, or the function returns NaN, an infinite or a negative number for staleness 0, 1
        or 2. Weights for a higher staleness are checked when they are used.
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
        return f"{type(self).__name__}(rule={name})"

    def weight(self, staleness: int) -> float:
        """Returns the weight of a gradient of this staleness.

        Raises:
          ValueError: the user's rule returned no finite number of 0 or more.
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
    """Drops each gradient whose staleness exceeds m when it would be applied. Its part of the batch is lost.

    Args:
      max_staleness: m, the highest staleness (global step - local step) that is still applied; 0 or more.

    Raises:
      ValueError: `max_staleness` is no integer of 0 or more.
    """

    def __init__(self, max_staleness: int) -> None:
        super().__init__()
        _checks.check_count("DropStale", "max_staleness", max_staleness, at_least=0)
        self.max_staleness = max_staleness

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_staleness={self.max_staleness})"


class BoundedStaleness(base.Policy):
    """Holds fast workers back so that no gradient is applied with a staleness above s. Drops no gradient.

    A gradient starts, and an update is made, only if every gradient in flight can still be applied within the bound
    afterwards. `Report.wait_secs` has the time for which updates were held back.

    Source: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server. Theirs
    bounds the distance between workers' clocks; here it is the staleness itself (global step - local step).

    Args:
      bound: s, 1 or more. At most (s + 1) * S gradients are in flight at once, with S from `SoftSync` (1 without it).
        With fewer workers than that, all of similar speed, the bound costs no time.

    Raises:
      ValueError: `bound` is no positive integer.
    """

    def __init__(self, bound: int) -> None:
        super().__init__()
        if not _checks.is_count(bound, at_least=1):
            raise ValueError(
                "BoundedStaleness(bound=...) must be an integer of at least 1; for a bound of 0 train synchronously, "
                f"with tfdist.BackupWorkers(spares=0). Received: bound={bound!r}"
            )
        self.bound = bound

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bound={self.bound})"
