# SPDX-License-Identifier: Apache-2.0
"""What a strategy knows besides variables that training depends on, to be saved with them."""

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
      warming: leads a warmup phase on a mirrored strategy, if there is one.
      averaging: averages, if that is done.
    """

    def __init__(
        self, policies: Sequence[Policy], warming: WarmupEngine | None = None, averaging: AveragingEngine | None = None
    ) -> None:
        self._policies = {type(policy).__name__: policy for policy in policies}
        self._warming = warming
        self._averaging = averaging

    def state(self) -> dict[str, Any]:
        """The state of each policy (JSON data), by its name."""
        return {name: policy.state() for name, policy in self._policies.items()}

    def take(self, state: dict[str, Any], is_in_epoch: bool) -> None:
        """Takes a state over, of those policies that are there still.

        Args:
          state: what `state` returned.
          is_in_epoch: whether `fit` goes on in the middle of an epoch.
        """
        for name, policy in self._policies.items():
            if name in state:
                policy.take(state[name])
        if self._warming is not None and is_in_epoch:
            self._warming.go_on_in_epoch()

    @property
    def is_level(self) -> bool:
        """Whether the step that was made last needed all workers, so that none of them is ahead."""
        return self._averaging is None or self._averaging.is_level

    def settle(self) -> None:
        """Has the model's variables be what is to be saved; all workers call it at the same place."""
        if self._averaging is not None:
            self._averaging.settle()

    @property
    def is_chief_ahead(self) -> bool:
        """Whether the chief has trained alone, and the other workers wait elsewhere to hear of it."""
        return self._warming is not None and self._warming.is_ahead

    def variables(self, model: keras.Model) -> list[Any]:
        """Keras variables that belong neither to the model nor to its optimizers; those must be built."""
        return self._averaging.variables(model) if self._averaging is not None else []
