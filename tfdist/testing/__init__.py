# SPDX-License-Identifier: Apache-2.0
"""Injection of delays and faults, for tests of programs that use tfdist, and for tfdist's own tests.

with tfdist.testing.Delays({"worker:1": tfdist.testing.pareto(mean=0.2, a=2)}, seed=1):
    model.fit(dataset, callbacks=[tfdist.testing.Faults([(100, "kill", "worker:0")])])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.planning.simulation.delay_distributions import (
    DelayDistribution,
    constant,
    empirical,
    exponential,
    lognormal,
    pareto,
    stalls,
)
from tfdist.testing.delay_injection import Delays, delays

if TYPE_CHECKING:
    from tfdist.testing.faults import Faults, continue_task, kill, stop_task

__all__ = [
    "DelayDistribution",
    "Delays",
    "Faults",
    "constant",
    "continue_task",
    "delays",
    "empirical",
    "exponential",
    "kill",
    "lognormal",
    "pareto",
    "stalls",
    "stop_task",
]

_NEEDING_KERAS = ("Faults", "continue_task", "kill", "stop_task")


def __getattr__(name: str) -> Any:
    if name not in _NEEDING_KERAS:
        raise AttributeError(f"module 'tfdist.testing' has no attribute {name!r}")
    return getattr(importlib.import_module("tfdist.testing.faults"), name)
