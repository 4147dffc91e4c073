# SPDX-License-Identifier: Apache-2.0
"""Puts an embedded cluster under other policies: a process can join only one."""

from __future__ import annotations

from tfdist import ParameterServerStrategy
from tfdist.policies import composition
from tfdist.policies.base import Policy
from tfdist.telemetry.recorder import Recorder


def under(
    cluster: ParameterServerStrategy, num_workers: int, stall_secs: float, *policies: Policy
) -> ParameterServerStrategy:
    """The same cluster under these policies alone, and with a report of its own."""
    cluster._training.close()
    cluster.distribution.recorder = Recorder(cluster.distribution.recorder.names)
    composition.check_policies(policies, "ParameterServerStrategy")
    composed = composition.compose(policies, "ParameterServerStrategy", num_workers)
    cluster._follow_policies(policies, composed, "auto", stall_secs)
    return cluster
