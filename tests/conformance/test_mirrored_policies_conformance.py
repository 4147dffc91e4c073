# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy with a policy under which all replicas count is as one device."""

from __future__ import annotations

import pytest
from averaging import AS_WITHOUT_POLICY, LIKE_OTHERS, AveragingEveryStep
from cases import LOOPS, SIZES
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestBackupWorkers(Conformance):
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1
    # Loops unpack batches, which are handles here.
    left_out = LOOPS
    # Where cutting the step in two shows: what an optimizer is given, what a step writes and reads, who has examples.
    # Batches are handles, which the thread of a device reads. `TestMirrored` has the others of each kind.
    quick = frozenset(
        {
            *("global_clipnorm", "accumulation, clipnorm, ema", "loss scale, accumulation", "embedding, places"),
            *(
                "transforms, clip rows after the sum",
                "penalties, sum_over_batch_size, one example left",
                "own functions",
            ),
            *(f"step mean_by_hand, {size}" for size in SIZES),
            *("step of_both, one over", "step with slices", "step decorated", "step that assigns"),
            *("loss one per example, one over", "metric that shows its variable", "first call, step without call"),
            *("no batches", "order of the data", "ragged", "unknown length, whole executions"),
            "no run, in scope, graph, loss scale",
        }
    )
    # `TestAggregated` has these with the same policy, or a policy has no part in them.
    slow_tests = frozenset(
        {
            "test_evaluate_after_an_own_step_counts_no_empty_replica",
            "test_evaluate_and_predict_see_every_example_once",
            "test_model_compiled_again_trains_as_compiled_last",
            "test_callbacks_stop_schedule_save_and_restore",
            "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
            "test_error_of_the_data_is_raised",
            "test_steps_on_single_batches",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)])


class TestParameterAveraging(AveragingEveryStep):
    # Batches of one example are in `test_replicas_without_examples_leave_no_trace`.
    quick = frozenset({"sgd", "sum loss, eagerly"})
    # An error ends a step before anything is averaged.
    slow_tests = (
        LIKE_OTHERS
        | AS_WITHOUT_POLICY
        | {"test_error_of_an_operation_is_raised_and_the_next_fit_is_clean", "test_error_of_the_data_is_raised"}
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.ParameterAveraging(1)])
