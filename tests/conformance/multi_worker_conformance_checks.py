# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy on two workers is as one device. Run by `test_multi_worker_conformance.py`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import multi_worker_cluster
import own_models
import pytest
from averaging import AveragingEveryStep
from cases import LOOPS, OUTSIDE_OF_RUN, TRANSFORMS
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from training import assert_close, with_uneven_pipelines

import tfdist
from tfdist.transport import buckets


class Workers(Conformance):
    # The suite of MirroredStrategy with the same policy, or without one.
    repeats = True
    left_out = frozenset(OUTSIDE_OF_RUN)
    # A worker's error ends the collectives of all for good.
    test_error_of_an_operation_is_raised_and_the_next_fit_is_clean = None
    test_error_of_the_data_is_raised = None

    def expected(self, case: str, found: Any, directory: pathlib.Path) -> Any:
        return multi_worker_cluster.of_one_device(case, found, directory)


class TestMultiWorker(Workers):
    # The others are about the step, which is MirroredStrategy's, and about models, which are made in its scope.
    # `multi_worker_checks.py` has the callbacks that write.
    quick_tests = frozenset(
        {"test_exception_in_the_step_keeps_its_type", "test_replicas_without_examples_leave_no_trace"}
    )
    # What comes from the data, and what goes to files and to other workers.
    quick = frozenset(
        {
            *("single batches", "parts of two sizes", "predictions of other dtypes", "run_eagerly"),
            *("loop, iterator_as_an_argument", "loop, next_until_the_end", "loop, data_sets_from_a_function"),
        }
    )


class TestBackupWorkers(Workers):
    left_out = LOOPS | OUTSIDE_OF_RUN
    logs_within = 0.1
    quick_tests = frozenset({"test_own_pipelines_of_uneven_parts_count_by_their_examples"})
    quick = frozenset({"unknown length, steps_per_execution", TRANSFORMS[2]})

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
    # `test_parameter_averaging_workers.py` has its sums between processes.
    quick = frozenset()
    quick_tests = frozenset()

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> tfdist.MultiWorkerMirroredStrategy:
        return tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[tfdist.ParameterAveraging(1)])
