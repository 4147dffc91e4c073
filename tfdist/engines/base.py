# SPDX-License-Identifier: Apache-2.0
"""The protocol of the engines of the all-reduce strategies: what data sets and a strategy's `run` need of each.

A strategy chooses its engines when it is built, and has each make its data sets: `distribute`, whose arguments depend
on what there is to read. From there on the handle of each batch names its engine, so that one `run` serves all engines.
Whatever else an engine has, such as the averages before a checkpoint, is between that engine and its strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Engine(Protocol):
    """Carries batches from a data set to updates."""

    def open(self, dataset: Any, fit: Any) -> Iterator[Any] | None:
        """Opens a pass over a data set of this engine, outside of graphs.

        Args:
          dataset: the `DistributedDataset`.
          fit: the `running_loop.Fit` that reads it, or None if another loop does.

        Returns:
          An iterator over handles; None if the stock strategy's batches are to be read.
        """
        ...

    def run(self, step: Callable[..., Any], handle: Any) -> Any:
        """Runs a model's bound `train_step` on the batch of a handle; in cross-replica context, in a graph or eagerly.

        Returns:
          What the step returns, for all replicas of all workers together.
        """
        ...
