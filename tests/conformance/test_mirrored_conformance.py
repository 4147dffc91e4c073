# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy without a policy is as one device; `test_mirrored_loops_conformance.py` has its other cases."""

from __future__ import annotations

import pytest
from cases import CASES, IN_LOOPS
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestMirrored(Conformance):
    is_exclusive = False
    only = frozenset(CASES) - IN_LOOPS
    # What decides numbers: optimizers, losses and metrics, and parts of batches. Other suites have the other cases.
    quick = frozenset(
        {
            *("decay, ema", "compiled outside of the scope", "sparse inputs, clipvalue", "sum loss"),
            "class weights, validation_split, steps_per_epoch",
            *("fewer examples than replicas", "metrics of one number, fewer examples than replicas"),
            *("fewer examples than replicas, eagerly", "loss one number, fewer examples than replicas"),
            *("order of the data", "own functions, step decorated"),
            *("loss beside one of Keras", "losses of layers alone", "step average_by_tensorflow"),
        }
    )
    # `TestMultiWorker` has counts, `test_overlapping_calls.py` calls that overlap.
    quick_tests = frozenset(
        {
            "test_callbacks_stop_schedule_save_and_restore",
            "test_batch_of_another_size_than_a_stateful_layer_is_refused",
            "test_batch_of_several_first_dimensions_is_refused",
            "test_exception_in_the_step_keeps_its_type",
            "test_metric_variable_of_aggregation_mean_is_read",
            "test_model_compiled_again_trains_as_compiled_last",
            "test_policies_that_are_none_are_refused",
            "test_replicas_without_examples_leave_no_trace",
            "test_xla_is_refused_where_it_cannot_be",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
