# SPDX-License-Identifier: Apache-2.0
"""State that a checkpoint has besides a model's variables: a strategy's policies and engines say what theirs is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdist.policies.base import Policy


class WorkerState(Protocol):
    """State that differs from worker to worker."""

    def collect(self, model: Any) -> tuple[Any, list[Any]]:
        """Collects it; all workers call it at the same place.

        Returns:
          A description (JSON data; None if there is nothing), and arrays: those of all workers, on the chief.
        """
        ...

    def distribute(self, model: Any, described: Any, arrays: Sequence[Any]) -> None:
        """Gives each worker what `collect` returned, or its part of it if there are more or fewer workers now.

        All workers call it; only the chief has arrays. Without a description (None) the state begins anew.
        """
        ...


class SavedState:
    """State of policies and engines, `strategy.distribution.saved_state`.

    An engine that has something to save is a subclass, and overrides what it has.

    Args:
      policies: the user's argument of the strategy.
      engines: the strategy's engines that have something to save.
      of_workers: state that differs from worker to worker, by the name under which checkpoints have it.
    """

    _policies: Mapping[str, Policy] = {}
    _engines: Sequence[SavedState] = ()
    _of_workers: Mapping[str, WorkerState] = {}

    def __init__(
        self,
        policies: Sequence[Policy] = (),
        engines: Sequence[SavedState] = (),
        of_workers: Mapping[str, WorkerState] | None = None,
    ) -> None:
        self._policies = {type(policy).__name__: policy for policy in policies}
        self._engines = list(engines)
        self._of_workers = dict(of_workers or {})

    def state(self) -> dict[str, Any]:
        """Returns the state of each policy (JSON data), by its name."""
        return {name: policy.state() for name, policy in self._policies.items()}

    def restore(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """Restores what `state` returned; `is_in_epoch` is True if `fit` continues in the middle of an epoch."""
        for name in self._policies.keys() & state.keys():
            self._policies[name].restore(state[name])
        for engine in self._engines:
            engine.restore(state, is_in_epoch)

    def variables(self, model: Any) -> list[Any]:
        """Returns Keras variables that belong neither to the model nor to its optimizers, which must be built."""
        return [variable for engine in self._engines for variable in engine.variables(model)]

    def collect_state(self, model: Any) -> tuple[Any, list[Any]]:
        """Returns what differs from worker to worker; see `WorkerState.collect`.

        While the chief has trained alone there is nothing: the others are not here.
        """
        if self.is_chief_ahead:
            return None, []
        described, arrays = [], []
        for name, state in self._of_workers.items():
            description, found = state.collect(model)
            if description is not None:
                described.append([name, description, len(found)])
                arrays += found
        return described or None, arrays

    def distribute_state(self, model: Any, description: Any, arrays: Sequence[Any]) -> list[str]:
        """Restores what `collect_state` returned; see `WorkerState.distribute`.

        Returns:
          The names of what this strategy is without, which is left out.
        """
        described: dict[str, tuple[Any, Sequence[Any]]] = {}
        for name, of_state, count in description or ():
            described[name], arrays = (of_state, arrays[:count]), arrays[count:]
        for name, state in self._of_workers.items():
            state.distribute(model, *described.pop(name, (None, ())))
        return [*described]

    def synchronize(self) -> None:
        """Brings the model's variables to the values that are to be saved; all workers call it at the same place."""
        for engine in self._engines:
            engine.synchronize()

    @property
    def is_synchronized(self) -> bool:
        """True if the step that was made last needed all workers, so that no worker is ahead."""
        return all(engine.is_synchronized for engine in self._engines)

    @property
    def is_chief_ahead(self) -> bool:
        """True if the chief has trained alone, and the other workers wait elsewhere for its state."""
        return any(engine.is_chief_ahead for engine in self._engines)
