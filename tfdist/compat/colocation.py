# SPDX-License-Identifier: Apache-2.0
"""Replaces how a strategy has slots of optimizers made beside the variables that they belong to.

There is no public way: Keras calls `strategy.extended.colocate_vars_with` when an optimizer makes its slots, and a
strategy can't be given another `extended`. The replacement lives and ends with the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NEEDS = ("tensorflow.python.distribute.distribute_lib:StrategyExtendedV2.colocate_vars_with",)

Colocate = Callable[[Any], Any]


def replace(strategy: Any, wrap: Callable[[Colocate], Colocate]) -> None:
    """Replaces a strategy's `colocate_vars_with` by what `wrap` makes of it."""
    strategy.extended.colocate_vars_with = wrap(strategy.extended.colocate_vars_with)
