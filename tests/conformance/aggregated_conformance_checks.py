# SPDX-License-Identifier: Apache-2.0
"""ParameterServerStrategy whose four workers all count is as one device. Run by `test_parameter_server_policies.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import own_models
import pytest
from cases import LOOPS, TRANSFORMS
from conformance import Conformance, Numbers, pytest_generate_tests  # noqa: F401
from training import SETTINGS, assert_close, with_uneven_pipelines


class TestAggregated(Conformance):
    # Steps of custom loops are those of one worker: the next class.
    # Logs of losses that are sums count each worker's part of a batch alike.
    # Gradients of four workers are added up in the order of arrival, so that no bit repeats.
    # Seed generators must be made in the scope.
    left_out = LOOPS | {"sum loss", TRANSFORMS[2], "first call, loop", "first call, seeds from outside"}
    # `TestBackupWorkers` on devices splits the step in the same way, with masks and slices.
    quick = frozenset(
        {
            *("accumulation, clipnorm, ema", "embedding, places", TRANSFORMS[1], "parts of two sizes"),
            *("interrupted and resumed", "no batches"),
            "order of the data and of a part for validation",
            # Logs of parts of different sizes.
            *("dicts", "step tracked by other names", "metrics of one number, one over"),
        }
    )
    # `aggregated_overlap_checks.py` has the calls that overlap; the others are about models.
    quick_tests = frozenset(
        {
            "test_callbacks_stop_schedule_save_and_restore",
            "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
            "test_error_of_the_data_is_raised",
            "test_every_batch_of_a_generator_is_used_once",
            "test_exception_in_the_step_keeps_its_type",
            "test_own_pipelines_of_uneven_parts_count_by_their_examples",
            "test_own_train_step_keeps_its_logs",
            "test_replicas_without_examples_leave_no_trace",
        }
    )
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1

    def test_own_pipelines_of_uneven_parts_count_by_their_examples(self, strategy: Any) -> None:
        assert_close(*with_uneven_pipelines(strategy, own_models.one_number))


class TestLoopsBesideAPolicy(Numbers):
    only = frozenset({"first call, loop"})

    @pytest.fixture(autouse=True)
    def order_does_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(SETTINGS, "in_one_batch", True)
        yield
