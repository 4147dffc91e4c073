# SPDX-License-Identifier: Apache-2.0
"""The marks by which `ParameterServerStrategy` knows functions that `ClusterCoordinator` schedules.

There is no public way: the stock `run` warns about, and later refuses, what is not called in such a function, and
tells the two apart by marks of its own. The second one stays set when a function fails to trace.
"""

from __future__ import annotations

from typing import Any

NEEDS = (
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._allow_run_without_coordinator",
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended._being_scheduled",
)


def allow_without_coordinator(strategy: Any) -> None:
    """Makes the stock `run` accept functions that no coordinator schedules."""
    strategy.extended._allow_run_without_coordinator = True


def is_traced(strategy: Any) -> bool:
    """Returns True while a function that a coordinator schedules is traced."""
    return strategy.extended._being_scheduled


def reset(strategy: Any) -> None:
    """Says that none is being traced."""
    strategy.extended._being_scheduled = False
