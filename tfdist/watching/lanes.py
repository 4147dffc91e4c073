# SPDX-License-Identifier: Apache-2.0
"""Intervals of each worker in time: held back, input, computing, waiting, all-reduce. They never overlap in a lane."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.update_log import Contributions, Outcome, Updates


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One row for each gradient, sorted by worker and arrival. All times are seconds on the timeline's clock.

    A worker was held back in [held, start], waited for its batch in [start, read], computed in [read, arrival], waited
    for the others in [arrival, summing], and was in the all-reduce in [summing, end]. A worker that computes its next
    gradient before the update is made doesn't wait. Where a worker has several gradients under way
    at once, a later one begins when the earlier one has arrived.

    Attributes:
      row: index of the contribution.
      update: index of its update.
      worker: index of the worker.
      held, start, read, arrival, summing, end: limits of the intervals, float64, increasing within a worker.
    """

    row: np.ndarray
    update: np.ndarray
    worker: np.ndarray
    held: np.ndarray
    start: np.ndarray
    read: np.ndarray
    arrival: np.ndarray
    summing: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @staticmethod
    def of(updates: Updates, contributions: Contributions) -> Lanes:
        """Computes the lanes of consecutive updates with their contributions."""
        update = np.repeat(np.arange(len(updates)), updates.count)
        made = updates.time[update]
        arrival = made + np.minimum(contributions.arrival.astype(np.float64), 0.0)
        row = np.lexsort((arrival, contributions.worker))
        worker, arrival, made, update = contributions.worker[row], arrival[row], made[row], update[row]
        is_first = np.concatenate([[True], worker[1:] != worker[:-1]])[: len(row)]
        before = np.where(is_first, -np.inf, np.roll(arrival, 1))
        start = made + contributions.start[row].astype(np.float64)
        start = np.minimum(np.maximum(start, before), arrival)
        held = np.maximum(start - contributions.held[row].astype(np.float64), before)
        after = np.where(np.roll(is_first, -1), np.inf, np.roll(held, -1))
        is_accepted = contributions.outcome[row] == Outcome.ACCEPTED
        end = np.where(is_accepted, np.maximum(np.minimum(made, after), arrival), arrival)
        read = np.minimum(start + contributions.input[row], arrival)
        summing = np.where(is_accepted, np.maximum(end - updates.reduce[update], arrival), end)
        return Lanes(row, update, worker.astype(np.int64), held, start, read, arrival, summing, end)

    @property
    def limits(self) -> tuple[np.ndarray, ...]:
        """All limits, in order."""
        return self.held, self.start, self.read, self.arrival, self.summing, self.end
