# SPDX-License-Identifier: Apache-2.0
"""Adds up consecutive updates."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log.columns import Columns, Contributions, Float32, Float64, Int32, Int64, Updates


@dataclasses.dataclass(frozen=True)
class Groups(Columns):
    """Sums of consecutive updates, in one row (g = 1), or none; columns about gradients have a cell for each worker.

    Attributes:
      begin: float64 [g], opening of its first update.
      end: float64 [g], time of its last update.
      updates: int64 [g], number of updates.
      examples: int64 [g], number of examples.
      wait: float64 [g], sum of the updates' `wait`.
      reduce_secs: float64 [g], sum of the updates' `reduce`.
      accepted, dropped, lost: int32 [g, w], numbers of gradients.
      compute_secs: float32 [g, w], sum of arrival - start.
      compute_max: float32 [g, w], maximum of arrival - start.
      wait_secs: float32 [g, w], sum over accepted gradients of the update's time - its `reduce` - arrival.
      held_secs: float32 [g, w], sum of `held`.
      staleness_sum: int32 [g, w], over the accepted gradients.
      staleness_max: int32 [g, w], over the accepted gradients.
      input_secs: float32 [g, w], sum of `input`.
    """

    begin: Float64
    end: Float64
    updates: Int64
    examples: Int64
    wait: Float64
    reduce_secs: Float64
    accepted: Int32
    dropped: Int32
    lost: Int32
    compute_secs: Float32
    compute_max: Float32
    wait_secs: Float32
    held_secs: Float32
    staleness_sum: Int32
    staleness_max: Int32
    input_secs: Float32


def summarize(updates: Updates, contributions: Contributions, workers: int) -> Groups:
    """Adds up updates, of so many workers, and their contributions; no row without an update."""
    worker, is_accepted = contributions.worker, contributions.outcome == Outcome.ACCEPTED
    secs = contributions.arrival - contributions.start
    waits = -contributions.arrival - np.repeat(updates.reduce, updates.count)
    stale, each = np.where(is_accepted, contributions.staleness, 0), np.ones(len(contributions), bool)

    def total(chosen: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(worker[chosen], None if values is None else values[chosen], workers)[None]

    def largest(values: np.ndarray) -> np.ndarray:
        result = np.zeros((1, workers), values.dtype)
        np.maximum.at(result[0], worker, values)
        return result

    whole = Groups.of(
        begin=(updates.time - updates.opened)[:1],
        end=updates.time[-1:],
        updates=[len(updates)],
        examples=[updates.examples.sum(dtype=np.int64)],
        wait=[updates.wait.sum(dtype=np.float64)],
        reduce_secs=[updates.reduce.sum(dtype=np.float64)],
        accepted=total(is_accepted),
        dropped=total(contributions.outcome == Outcome.DROPPED),
        lost=total(contributions.outcome == Outcome.LOST),
        compute_secs=total(each, secs),
        compute_max=largest(secs),
        wait_secs=total(is_accepted, waits),
        held_secs=total(each, contributions.held),
        input_secs=total(each, contributions.input),
        staleness_sum=total(each, stale),
        staleness_max=largest(stale),
    )
    return whole[: len(updates)]
