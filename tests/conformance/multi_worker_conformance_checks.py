# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy on two workers is as one device. Run by `test_multi_worker_conformance.py`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import multi_worker_cluster
import own_models
import pytest
from averaging import AS_WITHOUT_POLICY, LIKE_OTHERS, AveragingEveryStep
from cases import LOOPS
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from training import assert_close, with_uneven_pipelines

import tfdist
from tfdist.transport import buckets


class Workers(Conformance):
    # A worker's error ends the collectives of all for good.
    test_error_of_an_operation_is_raised_and_the_next_fit_is_clean = None
    test_error_of_the_data_is_raised = None

    def expected(self, case: str, found: Any, directory: pathlib.Path) -> Any:
        return multi_worker_cluster.of_one_device(case, found, directory)


# Their steps, or their ways to the data, are those of other loops. `TestMirrored` has the last ones;
# `multi_worker_checks.py` has checkpoints, too.
_LIKE_OTHERS = {
    f"loop, {name}"
    for name in (
        *("for_outside_of_a_traced_step", "captured_data_set", "enumerated_data_set", "batches_given_by_name"),
        *("one_batch_again_and_again", "loop_within_a_replica", "structures_of_results", "gradient_penalty"),
        *("two_optimizers_and_a_persistent_tape", "loss_scaling", "weights_set_within_the_loop"),
        *("train_step_of_keras_given_to_run", "train_function_of_keras", "saved_models"),
        *("optimizers_made_outside_of_the_scope", "gradients_clipped_after_their_sum", "optional_in_a_graph"),
        *("metrics_and_evaluation_within_the_loop", "seed_generators_made_outside_of_the_scope"),
        *("batches_unpacked_by_the_caller", "checkpoints", "results_of_replicas", "for_outside_of_a_graph"),
    )
}


class TestMultiWorker(Workers):
    # The others are about the step, which is MirroredStrategy's, and about models, which are made in its scope.
    # `multi_worker_checks.py` has the callbacks that write.
    slow_tests = frozenset(
        {
            "test_callbacks_stop_schedule_save_and_restore",
            "test_evaluate_after_an_own_step_counts_no_empty_replica",
            "test_metric_variable_of_aggregation_mean_is_read",
            "test_model_compiled_again_trains_as_compiled_last",
            "test_own_train_step_keeps_its_logs",
            "test_steps_on_single_batches",
        }
    )
    # "embedding, clipnorm" has executions of several steps, and `test_resume_processes.py` has interruptions. The next
    # class has rows at places, a sum, and the order of the data.
    quick = LOOPS - _LIKE_OTHERS | {
        *("loss scale", "embedding, clipnorm", "ragged", "single batches", "transforms, clip rows after the sum"),
        *("metric that shows its variable", "parts of two sizes, unknown", "no batches"),
        "own functions, step decorated",
        *("fewer examples than replicas, eagerly", "predictions of other dtypes"),
    }


class TestBackupWorkers(Workers):
    left_out = LOOPS
    logs_within = 0.1
    slow_tests = LIKE_OTHERS | AS_WITHOUT_POLICY | {"test_every_batch_of_a_generator_is_used_once"}
    quick = frozenset(
        {
            *("embedding, clipnorm", "unknown length, steps_per_execution", "sum loss, eagerly"),
            *("embedding, places", "step tracked by other names, one over", "order of the data"),
            "transforms, identity, rows",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Iterator[tfdist.MultiWorkerMirroredStrategy]:
        with pytest.MonkeyPatch.context() as patch:
            # So that some tensors are large here.
            patch.setattr(buckets, "BUCKET_BYTES", 64)
            yield tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.BackupWorkers(spares=0)])

    def test_own_pipelines_of_uneven_parts_count_by_their_examples(
        self, strategy: tfdist.MultiWorkerMirroredStrategy
    ) -> None:
        assert_close(*with_uneven_pipelines(strategy, own_models.one_number))


class TestParameterAveraging(AveragingEveryStep, Workers):
    quick = frozenset({"steps_per_execution", "sum loss, eagerly"})
    # An average of weights asks no worker for examples: MirroredStrategy's tests have batches of too few.
    slow_tests = LIKE_OTHERS | AS_WITHOUT_POLICY | {"test_replicas_without_examples_leave_no_trace"}

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> tfdist.MultiWorkerMirroredStrategy:
        return tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.ParameterAveraging(1)])
