# SPDX-License-Identifier: Apache-2.0
"""Compares `Update.contributions` with the gradients that a test has started, and with the other counts of updates."""

from __future__ import annotations

import collections
from typing import Any

from tfdist.policies import Aggregation, Outcome, Update


class Ledger:
    """Watches a policy's `started` and `updated`. Start times must differ.

    Attributes:
      open: (replica, start) -> local step of each gradient that no update has named yet.
      outcomes: number of gradients by replica and outcome.
    """

    def __init__(self, policy: Aggregation) -> None:
        self.open: dict[tuple[int, float], int] = {}
        self.outcomes: collections.Counter[tuple[int, Outcome]] = collections.Counter()
        # Gradients that ended while the last update was made: the next one names them.
        self._ended: set[tuple[int, float]] = set()
        started, updated = policy.started, policy.updated

        def start(replica: int, time: float) -> int:
            local_step = self.open[replica, time] = started(replica, time)
            return local_step

        def update(time: float, **kwargs: Any) -> Update:
            step, made = policy.step, updated(time, **kwargs)
            self._check(made, step, time)
            self._check_open(policy)
            return made

        policy.started, policy.updated = start, update

    def _check(self, update: Update, step: int, time: float) -> None:
        accepted = update.contributions[len(update.contributions) - len(update.contributors) :]
        assert tuple(each.replica for each in accepted) == update.contributors
        assert tuple(each.staleness for each in accepted) == update.staleness
        assert tuple(each.weight for each in accepted) == update.weights
        assert all(each.outcome is Outcome.ACCEPTED for each in accepted)
        for each in update.contributions:
            # Each gradient that was started is named once: pop raises a KeyError for the second time.
            local_step = self.open.pop((each.replica, each.start))
            assert each.start <= each.arrival <= time
            assert 0 <= each.staleness <= step - local_step
            assert each.outcome is not Outcome.ACCEPTED or each.staleness == step - local_step
            assert each.outcome is Outcome.ACCEPTED or each.weight == 0.0
            assert each.held >= 0.0
            self.outcomes[each.replica, each.outcome] += 1
        others = update.contributions[: len(update.contributions) - len(accepted)]
        assert all(each.outcome is not Outcome.ACCEPTED for each in others)
        # Besides these, `dropped` has arrivals of gradients that were lost or withdrawn before.
        dropped = collections.Counter(each.replica for each in others if each.outcome is Outcome.DROPPED)
        assert dropped <= collections.Counter(update.dropped)

    def _check_open(self, policy: Aggregation) -> None:
        """Each gradient that no update has named is computed, or waits for its update."""
        ended = {
            (replica, start)
            for (replica, start), local_step in self.open.items()
            if not policy.is_computing(replica, local_step) and replica not in policy.contributors
        }
        assert not ended & self._ended
        self._ended = ended
