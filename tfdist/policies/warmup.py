# SPDX-License-Identifier: Apache-2.0
"""Warmup phase: one replica trains first, and the others join at the end of the phase."""

from __future__ import annotations

from typing import Any

from tfdist import _checks
from tfdist.policies import base


class Warmup(base.Policy):
    """Lets only one replica train first; then its state is broadcast, and all replicas train.

    During the phase the other replicas compute nothing and send nothing. At its end they receive all variables of the
    model, trainable or not, and of the optimizer. An update of the phase uses one replica's own batch, so it equals an
    update on one device.

    Asynchronous training is unstable at the start, when gradients are large and change fast. For that reason Dean et
    al. 2012, Large Scale Distributed Deep Networks, section 4.1, warm up with one replica.

    Args:
      steps: length of the phase in updates; 1 or more.
      epochs: length of the phase in epochs of `fit`, instead of `steps`; 1 or more.
      ramp: True if replicas join one at a time: two replicas train for as long as the first one did, then three, ...

    Raises:
      ValueError: not exactly one of steps and epochs is given, or it is no positive integer.
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
        if not _checks.is_count(length, at_least=1):
            raise ValueError(
                f"Warmup({self.unit}=...) must be an integer of at least 1. Received: {self.unit}={length!r}"
            )
        self.length: int = length
        self.ramp = bool(ramp)
        # Steps begun, or epochs begun, so far.
        self._begun = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unit}={self.length}{', ramp=True' if self.ramp else ''})"

    def opened(self, is_first_of_epoch: bool) -> int:
        """Counts another update that Keras asks for.

        Returns:
          The number of replicas that take part in the update: 1 during the phase, `total_num_replicas` after it.
        """
        self._begun = self._begun_with_next(is_first_of_epoch)
        return self.num_taking_part

    def taking_part_next(self, is_first_of_epoch: bool) -> int:
        """Returns what `opened` would return, without counting an update."""
        return self._taking_part(self._begun_with_next(is_first_of_epoch))

    def resume(self, begun: int) -> None:
        """Sets the number of steps, or epochs, begun so far: for a restored checkpoint, or by the chief's count."""
        self._begun = begun

    def state(self) -> dict[str, Any]:
        """See `Policy.state`."""
        return {"begun": self._begun}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Policy.restore`."""
        self.resume(state["begun"])

    @property
    def begun(self) -> int:
        """Number of steps, or epochs, begun so far."""
        return self._begun

    @property
    def num_taking_part(self) -> int:
        """Number of replicas that take part in the update that Keras asked for last."""
        return self._taking_part(self._begun)

    @property
    def is_over(self) -> bool:
        """True if all replicas take part."""
        return self._total > 0 and self.num_taking_part == self._total

    def _begun_with_next(self, is_first_of_epoch: bool) -> int:
        return self._begun + (self.unit == "steps" or is_first_of_epoch or not self._begun)

    def _taking_part(self, begun: int) -> int:
        ended = max(0, begun - 1) // self.length
        if self.ramp:
            return min(self._total, 1 + ended)
        return self._total if ended else 1

    def check_replicas(self, total_num_replicas: int, strategy: str) -> None:
        """See `Policy.check_replicas`."""
        if total_num_replicas == 1:
            raise ValueError(
                f"{self!r} needs a second replica, which joins later, and {strategy} has only one; leave it away. "
                f"Received: total_num_replicas={total_num_replicas}"
            )
