# SPDX-License-Identifier: Apache-2.0
"""Values that an aggregation policy returns: `Arrival` for one gradient, `Update` for one update of the variables."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Answer to `Policy.arrived`.

    Attributes:
      accepted: whether the gradient enters the update.
      staleness: global step - local step.
      weight: factor for the gradient, as far as it is known at arrival; 0.0 for a dropped gradient.
      number: index of this gradient among all accepted gradients, from 0; -1 for a dropped gradient.
    """

    accepted: bool
    staleness: int
    weight: float
    number: int = -1


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the policy's settings, such as another number of spares, as one line for the log."""

    text: str


@dataclasses.dataclass(frozen=True)
class Update:
    """Answer to `Policy.updated`: the gradients of the update, and its statistics.

    Attributes:
      step: the global step after this update.
      contributors: replicas, in the order in which their gradients arrived.
      dropped: replicas whose gradient was dropped since the previous update, in order. A replica may appear twice.
      staleness: staleness of each contributor's gradient, in the same order.
      wait_secs: from the opening of this step until enough gradients had arrived; 0 if they had arrived before. A step
        opens when Keras asks for it (`Aggregation.opened`), else at the previous update.
      spread_secs: from the first to the last gradient of this update.
      changes: changes of the policy's settings since the previous update.
      weights: factor of each contributor's gradient, in the same order.
      numbers: `Arrival.number` of each contributor's gradient, in the same order.
      held_secs: for each replica, the time since the previous update in which it had delivered a gradient and was not
        allowed to start the next one.
    """

    step: int
    contributors: tuple[int, ...]
    dropped: tuple[int, ...]
    staleness: tuple[int, ...]
    wait_secs: float
    spread_secs: float
    changes: tuple[Change, ...]
    weights: tuple[float, ...] = ()
    numbers: tuple[int, ...] = ()
    held_secs: tuple[float, ...] = ()

    @staticmethod
    def of_one(step: int, replica: int, staleness: int) -> Update:
        """Builds the update of plain asynchronous training: one gradient, applied as soon as it arrived."""
        return Update(step, (replica,), (), (staleness,), 0.0, 0.0, (), (1.0,))
