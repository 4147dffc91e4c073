# SPDX-License-Identifier: Apache-2.0
"""State of a strategy's policies, which a checkpoint saves with the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.engines.averaging.engine import AveragingEngine
from tfdist.engines.warmup.engine import WarmupEngine
from tfdist.policies.base import Policy


class PoliciesToSave:
    """The state of a strategy's policies.

    Args:
      policies: what the user gave to the strategy.
      warming: the engine of the warmup phase on a mirrored strategy, if there is one.
      averaging: the engine of parameter averaging, if there is one.
    """

    def __init__(
        self, policies: Sequence[Policy], warming: WarmupEngine | None = None, averaging: AveragingEngine | None = None
    ) -> None:
        self._policies = {type(policy).__name__: policy for policy in policies}
        self._warming = warming
        self._averaging = averaging

    def state(self) -> dict[str, Any]:
        """Returns the state of each policy (JSON data), by its name."""
        return {name: policy.state() for name, policy in self._policies.items()}

    def restore(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """Restores the state of the policies that the strategy still has.

        Args:
          state: what `state` returned.
          is_in_epoch: whether `fit` goes on in the middle of an epoch.
        """
        for name, policy in self._policies.items():
            if name in state:
                policy.restore(state[name])
        if self._warming is not None and is_in_epoch:
            self._warming.go_on_in_epoch()

    @property
    def is_synchronized(self) -> bool:
        """True if the last step needed all workers, so that no worker is ahead of another."""
        return self._averaging is None or self._averaging.is_level

    def synchronize(self) -> None:
        """Averages the model's variables if averaging is due before a save; all workers call it at the same place."""
        if self._averaging is not None:
            self._averaging.settle()

    @property
    def is_chief_ahead(self) -> bool:
        """True if the chief has trained alone, and the other workers wait for its variables."""
        return self._warming is not None and self._warming.is_ahead

    def variables(self, model: keras.Model) -> list[Any]:
        """Returns the Keras variables that belong to neither the model nor its optimizers, which must be built."""
        return self._averaging.variables(model) if self._averaging is not None else []
