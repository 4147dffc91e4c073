# SPDX-License-Identifier: Apache-2.0
"""One embedded cluster whose two workers have two logical CPUs each, for `server_parts_*checks.py`. A pytest plugin."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import changed_policies
import pytest
import tensorflow as tf

import tfdist

NUM_WORKERS = 2
STALL_SECS = 200


def pytest_configure() -> None:
    """Gives the workers two devices each: those of an embedded cluster have as many as this program."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture(scope="session")
def cluster() -> tfdist.ParameterServerStrategy:
    return tfdist.ParameterServerStrategy(
        num_workers=NUM_WORKERS,
        num_ps=2,
        policies=[tfdist.BackupWorkers(spares=0)],
        stall_timeout_secs=STALL_SECS,
        devices_per_replica=2,
        # Takes the largest table of the checks alone.
        variable_partitioner=tfdist.ShardedTables(min_bytes=1 << 20),
    )


@pytest.fixture
def with_policies(cluster: tfdist.ParameterServerStrategy) -> Callable[..., tfdist.ParameterServerStrategy]:
    def under(*policies: Any) -> tfdist.ParameterServerStrategy:
        if policies:
            if cluster._training is cluster._engine:
                # Which stays, for functions that are no train steps.
                cluster._training = SimpleNamespace(close=lambda: None)  # pyright: ignore
            return changed_policies.under(cluster, NUM_WORKERS, STALL_SECS, *policies)
        cluster._training.close()
        cluster._training, cluster._engine.programs.accumulates = cluster._engine, True
        cluster.distribution.take((), cluster._engine)
        return cluster

    return under


@pytest.fixture
def strategy(with_policies: Callable[..., tfdist.ParameterServerStrategy]) -> tfdist.ParameterServerStrategy:
    """Every worker counts."""
    return with_policies(tfdist.BackupWorkers(spares=0))
