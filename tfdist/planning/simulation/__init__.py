# SPDX-License-Identifier: Apache-2.0
"""Simulator of distributed training: the real policies on model clusters of any size, in simulated time.

    from tfdist import simulation

    result = simulation.simulate(
        simulation.ClusterModel(
            workers=8,
            compute=simulation.lognormal(mean=0.2, s=1.0),
            network=simulation.NetworkModel(bandwidth="10Gbit", latency_secs="50us"),
        ),
        simulation.ModelProfile(dense_bytes="100MB", batch_size=32),
        strategy="ParameterServerStrategy",
        policies=[tfdist.BackupWorkers(spares=1)],
        num_updates=200,
    )
    print(result)             # throughput, efficiency, waits, drops, links, and what limits it
    result.to_dict()          # the same as JSON data
    result.gradients[0]       # record of each gradient: start, arrival, staleness, outcome

`simulate_policy` runs a policy alone, where nothing but gradients takes time. Tests compare it with exact results
(`tests/planning/test_closed_forms.py`). No module imports TensorFlow or NumPy. docs/scaling.md explains the models.
"""

from tfdist.planning.simulation.delay_distributions import (
    DelayDistribution,
    constant,
    empirical,
    exponential,
    lognormal,
    pareto,
    stalls,
)
from tfdist.planning.simulation.models import ClusterModel, CodecModel, Failure, ModelProfile, NetworkModel, SparseTable
from tfdist.planning.simulation.result import GradientRecord, GradientRecords, LinkUse, Result, Simulation
from tfdist.planning.simulation.simulator import simulate, simulate_policy

__all__ = [
    "ClusterModel",
    "CodecModel",
    "DelayDistribution",
    "Failure",
    "GradientRecord",
    "GradientRecords",
    "LinkUse",
    "ModelProfile",
    "NetworkModel",
    "Result",
    "Simulation",
    "SparseTable",
    "constant",
    "empirical",
    "exponential",
    "lognormal",
    "pareto",
    "simulate",
    "simulate_policy",
    "stalls",
]
