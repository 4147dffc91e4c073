# SPDX-License-Identifier: Apache-2.0
"""The warmup phase: one replica trains first, and the others join when it is over."""

from __future__ import annotations

from typing import Any

from tfdist.policies import base


class Warmup(base.Policy):
    """Lets only one replica train first; then all have what it has learned, and training goes on with them.

    In the phase the other replicas compute nothing and send nothing. At its end they have the model's variables, the
    optimizer's and those that are not trained. An update of the phase is made of one replica's own batch, so it is that
    of one device.

    Asynchronous training is unstable at the start, when gradients are large and change fast; Dean et al. 2012, Large
    Scale Distributed Deep Networks, section 4.1, warm up with one replica for that reason.

    Args:
      steps: how many updates the phase lasts; 1 or more.
      epochs: how many epochs of `fit` it lasts, instead; 1 or more.
      ramp: whether replicas join one at a time: two train for as long again as the first one did, then three, ...

    Raises:
      ValueError: not exactly one of steps and epochs is given, or it is no such number.
    """

    def __init__(self, *, steps: int | None = None, epochs: int | None = None, ramp: bool = False) -> None:
        super().__init__()
        if (steps is None) == (epochs is None):
            raise ValueError(
                "Warmup(steps=n) or Warmup(epochs=e): give one of them, as long as one replica is to train alone. "
                f"Received: steps={steps!r}, epochs={epochs!r}"
            )
        self.unit = "steps" if epochs is None else "epochs"
        length = steps if epochs is None else epochs
        if not base.is_count(length, at_least=1):
            raise ValueError(
                f"Warmup({self.unit}=...) must be a whole number from 1 on. Received: {self.unit}={length!r}"
            )
        self.length: int = length
        self.ramp = bool(ramp)
        # Steps begun, or epochs begun, so far.
        self._begun = 0

    def __repr__(self) -> str:
        return f"Warmup({self.unit}={self.length}{', ramp=True' if self.ramp else ''})"

    def opened(self, is_first_of_epoch: bool) -> int:
        """Keras asks for another update.

        Args:
          is_first_of_epoch: whether it is the first of an epoch.

        Returns:
          How many replicas take part in it: 1 in the phase, `total_num_replicas` after it.
        """
        self._begun = self._begun_with_next(is_first_of_epoch)
        return self.num_taking_part

    def taking_part_next(self, is_first_of_epoch: bool) -> int:
        """What `opened` would return; nothing changes."""
        return self._taking_part(self._begun_with_next(is_first_of_epoch))

    def resume(self, begun: int) -> None:
        """From now on as if so many of the phase's units were begun, because somebody who knows better says so."""
        self._begun = begun

    def state(self) -> dict[str, Any]:
        """See `Policy.state`."""
        return {"begun": self._begun}

    def take(self, state: dict[str, Any]) -> None:
        """See `Policy.take`."""
        self.resume(state["begun"])

    @property
    def begun(self) -> int:
        """How many steps, or epochs, were begun so far."""
        return self._begun

    @property
    def num_taking_part(self) -> int:
        """How many replicas take part in the update that Keras asked for last."""
        return self._taking_part(self._begun)

    @property
    def is_over(self) -> bool:
        """Whether all replicas take part."""
        return self._total > 0 and self.num_taking_part == self._total

    def _begun_with_next(self, is_first_of_epoch: bool) -> int:
        return self._begun + (self.unit == "steps" or is_first_of_epoch or not self._begun)

    def _taking_part(self, begun: int) -> int:
        ended = max(0, begun - 1) // self.length
        if self.ramp:
            return min(self._total, 1 + ended)
        return self._total if ended else 1

    def _check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        if total_num_replicas == 1:
            raise ValueError(
                f"{self!r} needs a second replica, which joins later, and {strategy} has only one; leave it away. "
                f"Received: total_num_replicas={total_num_replicas}"
            )
