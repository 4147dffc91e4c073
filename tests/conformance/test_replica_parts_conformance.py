# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy whose replicas span devices is as one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spanning
from averaging import AS_WITHOUT_POLICY, LIKE_OTHERS
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestSpanningDevices(Conformance):
    """Two replicas of two devices each; layers are placed alternately."""

    is_exclusive = False
    # Where an operation runs depends on the parts of a step: eager, graph and loops, gradients that are dense, sparse
    # and of a loop, sums that an optimizer clips, scales and keeps. `TestMirrored` has the others on one device each.
    quick = frozenset(
        {
            *("accumulation, clipnorm, ema", "loss scale", "steps_per_execution", "run_eagerly", "unknown length"),
            *("embedding, clipnorm", "recurrent, built from one example", "step mean_by_hand, one over"),
            *("interrupted and resumed", "no run, in scope, graph, loss scale"),
            *("loop, gradient_penalty", "loop, checkpoints", "transforms, clip after the sum"),
        }
    )
    slow_tests = (
        LIKE_OTHERS
        | AS_WITHOUT_POLICY
        | {
            *("test_every_batch_of_a_generator_is_used_once", "test_replicas_without_examples_leave_no_trace"),
            "test_error_of_an_operation_is_raised_and_the_next_fit_is_clean",
            "test_error_of_the_data_is_raised",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> Iterator[tfdist.MirroredStrategy]:
        strategy = tfdist.MirroredStrategy(cpus[:4], devices_per_replica=2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            spanning.place_alternately(strategy, monkeypatch)
            yield strategy
