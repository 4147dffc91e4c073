# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy with a policy under which all replicas count is as one device."""

from __future__ import annotations

import pytest
from averaging import AveragingEveryStep
from cases import LOOPS
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestBackupWorkers(Conformance):
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1
    # Loops unpack batches, which are handles here; no `tf.function` takes one.
    left_out = LOOPS | {"own functions", "own functions, step decorated", "first call, loop"}
    # Where cutting the step in two shows: what an optimizer is given, what a step writes and reads, who has examples.
    # Batches are handles, which the thread of a device reads. `TestMirrored` has the others of each kind.
    quick = frozenset(
        # "dicts": logs of parts of different sizes.
        {"accumulation, clipnorm, ema", "embedding, places", "ragged", "step with slices", "dicts"}
    )
    # `TestAggregated` has others with the same policy, or a policy has no part in them.
    quick_tests = frozenset(
        {
            "test_exception_in_the_step_keeps_its_type",
            "test_own_train_step_keeps_its_logs",
            "test_replicas_without_examples_leave_no_trace",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])


class TestParameterAveraging(AveragingEveryStep):
    quick = frozenset({"sum loss, eagerly"})
    quick_tests = frozenset()

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.ParameterAveraging(1)])
