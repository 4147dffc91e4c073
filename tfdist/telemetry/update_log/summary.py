# SPDX-License-Identifier: Apache-2.0
"""Adds up consecutive updates: for totals, and for levels of detail on a screen."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log.columns import Columns, Contributions, Float32, Float64, Int32, Int64, Updates


@dataclasses.dataclass(frozen=True)
class Groups(Columns):
    """One row for each group of consecutive updates, g of them; columns about gradients have a cell for each worker.

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


def summarize(updates: Updates, contributions: Contributions, starts: np.ndarray, workers: int) -> Groups:
    """Adds up updates.

    Args:
      updates: n updates.
      contributions: their contributions, in the order of the updates.
      starts: index of the first update of each group, increasing, from 0; without any there is no group.
      workers: number of workers.
    """
    ends = np.append(starts[1:], len(updates))[: len(starts)]
    return Groups.of(
        begin=(updates.time - updates.opened)[starts],
        end=updates.time[ends - 1],
        updates=ends - starts,
        examples=np.add.reduceat(updates.examples, starts, dtype=np.int64),
        wait=np.add.reduceat(updates.wait, starts, dtype=np.float64),
        reduce_secs=np.add.reduceat(updates.reduce, starts, dtype=np.float64),
        **_cells(updates, contributions, starts, workers),
    )


def _cells(updates: Updates, contributions: Contributions, starts: np.ndarray, workers: int) -> dict[str, np.ndarray]:
    """Returns the columns of shape [g, w]."""
    shape = len(starts), workers
    per_group = np.add.reduceat(updates.count, starts, dtype=np.int64)
    cell = np.repeat(np.arange(len(starts), dtype=np.int64) * workers, per_group) + contributions.worker
    secs = contributions.arrival - contributions.start
    is_accepted = contributions.outcome == Outcome.ACCEPTED
    accepted = cell[is_accepted]
    waits = -contributions.arrival - np.repeat(updates.reduce, updates.count)
    staleness = contributions.staleness[is_accepted]
    size = shape[0] * shape[1]

    def total(cells: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(cells, weights, size).reshape(shape)

    def largest(cells: np.ndarray, values: np.ndarray) -> np.ndarray:
        result = np.zeros(size, values.dtype)
        np.maximum.at(result, cells, values)
        return result.reshape(shape)

    return {
        "accepted": total(accepted),
        "dropped": total(cell[contributions.outcome == Outcome.DROPPED]),
        "lost": total(cell[contributions.outcome == Outcome.LOST]),
        "compute_secs": total(cell, secs),
        "compute_max": largest(cell, secs),
        "wait_secs": total(accepted, waits[is_accepted]),
        "held_secs": total(cell, contributions.held),
        "input_secs": total(cell, contributions.input),
        "staleness_sum": total(accepted, staleness),
        "staleness_max": largest(accepted, staleness),
    }
