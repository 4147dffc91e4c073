# SPDX-License-Identifier: Apache-2.0
"""Asynchronous ParameterServerStrategy is as one device where no steps overlap. Run by `test_parameter_server.py`.

All examples are one batch, or all batches are alike: workers take them in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import aggregated_conformance_checks
import guide_loops
import pytest
from cases import LOOPS, REPEATED, TRANSFORMS
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from training import SETTINGS

_SYNCHRONOUS = {
    f"loop, {name}"
    for name in (
        *guide_loops.SAVING,
        "gradients_clipped_after_their_sum",
        "loss_scaling",
        "metrics_and_evaluation_within_the_loop",
        "optimizers_made_outside_of_the_scope",
        "seed_generators_made_outside_of_the_scope",
        "weights_set_within_the_loop",
    )
}
# What happens in another way if no worker waits for others.
_HERE_TOO = {"no batches", TRANSFORMS[1], "step decorated", "own functions, step decorated"}


class TestAsynchronous(Conformance):
    # Seed generators must be made in the scope. Each worker accumulates gradients of its own, and has any batches.
    left_out = LOOPS - _SYNCHRONOUS | {
        *("first call, seeds from outside", "accumulation, clipnorm, ema", "loss scale, accumulation"),
        *("order of the data", "parts of two sizes, known", "parts of two sizes, unknown"),
    }
    # What happens to the results of several workers, and to the parts of a batch, is in `TestAggregated`.
    slow = REPEATED | aggregated_conformance_checks.TestAggregated.quick - _HERE_TOO

    # No part of a batch is empty; `parameter_server_inputs_checks.py` counts what `evaluate` and `predict` read,
    # `parameter_server_loops_checks.py` has callbacks and errors, `parameter_server_models_checks.py` own steps.
    slow_tests = frozenset(
        {
            "test_callbacks_stop_schedule_save_and_restore",
            "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
            "test_error_of_the_data_is_raised",
            "test_own_train_step_keeps_its_logs",
            "test_evaluate_after_an_own_step_counts_no_empty_replica",
            "test_evaluate_and_predict_see_every_example_once",
            "test_metric_variable_of_aggregation_mean_is_read",
            "test_model_compiled_again_trains_as_compiled_last",
            "test_replicas_without_examples_leave_no_trace",
        }
    )
    # Batches are not divided.
    test_batch_of_several_first_dimensions_is_refused = None
    # Logs that are no metrics are those of any step; `parameter_server_inputs_checks.py` counts in metrics.
    test_every_batch_of_a_generator_is_used_once = None

    @pytest.fixture(autouse=True)
    def order_does_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(SETTINGS, "in_one_batch", True)
        guide_loops.same_batches(monkeypatch)
        yield
