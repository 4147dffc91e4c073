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
            *("sparse inputs, clipvalue", "class weights, validation_split, steps_per_epoch", "order of the data"),
            *("fewer examples than replicas", "metrics of one number, fewer examples than replicas"),
            *("loss one number, fewer examples than replicas", "step average_by_tensorflow"),
            *("loss sum by its own call", "step with optimizers in a list"),
        }
    )
    # `multi_worker_checks.py` has callbacks, `test_overlapping_calls.py` calls that overlap.
    quick_tests = frozenset(
        {
            "test_batch_of_another_size_than_a_stateful_layer_is_refused",
            "test_batch_of_several_first_dimensions_is_refused",
            "test_exception_in_the_step_keeps_its_type",
            "test_metric_variable_of_aggregation_mean_is_read",
            "test_policies_that_are_none_are_refused",
            "test_xla_is_refused_where_it_cannot_be",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
