# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy without a policy, and with one under which all replicas count, is as one device."""

from __future__ import annotations

import pytest
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestMirrored(Conformance):
    slow = frozenset({"fewer examples than replicas", "batches of one size", "constraint", "constraint, sum loss"})

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])


class TestBackupWorkers(Conformance):
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1
    left_out = frozenset({"step tracked, one over", "step tracked, fewer examples than replicas"})
    slow = frozenset(
        {
            *("steps_per_execution", "run_eagerly", "validation_split", "steps_per_epoch", "sample_weight"),
            *("fewer examples than replicas", "batches of one size", "sum loss", "class weights", "dicts"),
            *("embedding", "embedding, steps_per_execution", "embedding, clipnorm"),
            *("constraint", "constraint, sum loss", "ema overwrites", "sgd", "GRU, both directions", "ConvLSTM"),
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])
