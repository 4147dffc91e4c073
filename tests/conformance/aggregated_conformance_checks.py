# SPDX-License-Identifier: Apache-2.0
"""ParameterServerStrategy whose four workers all count is as one device. Run by `test_parameter_server_policies.py`."""

from __future__ import annotations

from cases import LOOPS, TRANSFORMS
from conformance import Conformance, pytest_generate_tests  # noqa: F401


class TestAggregated(Conformance):
    # Steps of custom loops are those of one worker.
    # Gradients of four workers are added up in the order of arrival, so that no bit repeats.
    # Seed generators must be made in the scope.
    left_out = LOOPS | {TRANSFORMS[2], "first call, loop", "first call, seeds from outside"}
    # `TestBackupWorkers` on devices splits the step in the same way.
    repeats = True
    # What happens to parts on their way: rows, sums changed on the servers, no part at all, whose example is whose.
    quick = frozenset({TRANSFORMS[1], "no batches", "order of the data and of a part for validation"})
    # `test_overlapping_calls.py` has the calls that overlap; the others are about models.
    quick_tests = frozenset(
        {
            "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
            "test_error_of_the_data_is_raised",
            "test_every_batch_of_a_generator_is_used_once",
            "test_exception_in_the_step_keeps_its_type",
        }
    )
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1
