# SPDX-License-Identifier: Apache-2.0
"""The protocol of all engines: what data sets, strategies and checkpoints need of each.

A strategy chooses its engines when it is built, and has each make its data sets: `distribute`, whose arguments depend
on what there is to read. From there on the handle of each batch names its engine. Engines whose step stays in Keras'
graph read `step_times.Timed` elements in their place. What else an engine has, such as the averages before a
checkpoint, is between that engine and its strategy.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.passes.handle import check_eager
from tfdist.policies.saved_state import SavedState
from tfdist.step.step import Step, Traces


class Engine(SavedState, abc.ABC):
    """Carries batches from a data set to updates; saves no state of its own by default (see `SavedState`)."""

    @abc.abstractmethod
    def open(self, dataset: Any, fit: Any) -> Iterator[Any] | None:
        """Opens a pass over a data set of this engine, outside of graphs.

        Args:
          dataset: the `DistributedDataset`.
          fit: the `calls.Call` that reads it, or None if another loop does.

        Returns:
          An iterator over handles, or over `Timed` elements; None if the stock strategy's batches are to be read.
        """

    def run(self, step: Step, handle: Any) -> Any:
        """Runs a model's `train_step` on the batch of a handle, in cross-replica context.

        By default outside of graphs, by what `prepared` returns.

        Returns:
          What the step returns, for all replicas of all workers together.
        """
        check_eager("strategy.run")
        make = self._traces.find(step, (handle.kind,), lambda: self.prepared(step, handle))
        return make(handle.of, handle)

    @functools.cached_property
    def _traces(self) -> Traces:
        return Traces(most_kept=1)

    def prepared(self, step: Step, handle: Any) -> Callable[[Any, Any], Any]:
        """Traces a model's train step for the handles of a kind; an engine without handles overrides `run` instead.

        Args:
          step: a model's `train_step`.
          handle: of the next batch.

        Returns:
          What makes a step of the next batch and returns the logs, outside of graphs: a function of the pass and the
          handle.
        """
        raise NotImplementedError

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """Returns the Python exception of the last step, and forgets it, if TensorFlow raises another in its place.

        Args:
          error: the one that TensorFlow raises.
        """
        del error
        return None

    def barrier(self, writes: bool = False) -> None:
        """Waits until each step that was run has made its update, so that later reads and writes come after it.

        By default there is nothing to wait for. The operations of a step make the update before Keras' function
        returns, and late contributions only read variables.

        Args:
          writes: True if the caller is about to write variables; then earlier logs are invalid.
        """
        del writes

    def synchronize(self) -> None:
        """See `SavedState.synchronize`: by default the values after all steps."""
        self.barrier()

    def close(self) -> None:
        """Ends the engine's threads, if it has any; may be called again."""
