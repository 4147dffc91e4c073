# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy with a policy under which all replicas count is as one device."""

from __future__ import annotations

import pytest
from averaging import AS_WITHOUT_POLICY, LIKE_OTHERS, AveragingEveryStep
from cases import CASES, LOOPS
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from mirrored_cases import SLOW

import tfdist

pytestmark = pytest.mark.devices


class TestBackupWorkers(Conformance):
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1
    # Loops unpack batches, which are handles here.
    left_out = LOOPS
    # `TestMirrored` has the others of each kind.
    _only_here = frozenset(
        {"unknown length, whole executions", "recurrent, built from one example", "step of_both, one over"}
    )
    slow = SLOW - _only_here | {
        *("steps_per_execution", "run_eagerly", "validation_split", "steps_per_epoch", "sample_weight"),
        "fewer examples than replicas, eagerly",
        *("sum loss", "class weights", "dicts", "ema overwrites", "sgd", "ConvLSTM"),
        # `test_mirrored_policies.py` has batches of a Python generator, and "unknown length, whole executions" is here.
        *("embedding, clipnorm", "from Python", "unknown length, steps_per_execution"),
        # "recurrent, built from one example" is here, and `TestAggregated` has the same policy with these.
        *("LSTM", "interrupted and resumed", "first call, optimizer of its own"),
        # Parts of other optimizers, losses and first calls in this list.
        *("decay, ema", "penalties, sum, uneven", "loss one number, fewer examples than replicas", "own compute_loss"),
        *(
            "single batches",
            "step tracked, one over",
            "loss beside one of Keras",
            "first call, seed generator",
            "first call, layer with Trainer",
        ),
        # Models are built as without a policy.
        "restored before it is built",
        # The step finds a loss of users' code by `global_losses`, as without a policy.
        *("loss one number, tf.function, one over", "loss one number of a class, one over"),
        # A thread of a policy meets no other.
        "step reads losses after its update",
        # Nothing of a policy is in a loop without `run`; one is enough.
        *(name for name in CASES if "no run" in name and name != "no run, in scope, graph, loss scale"),
    }
    # `TestAggregated` has these with the same policy.
    slow_tests = frozenset(
        {
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
