# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy without a policy is as one device; `test_mirrored_loops_conformance.py` has its other cases."""

from __future__ import annotations

import pytest
from cases import CASES, IN_LOOPS, REPEATED
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestMirrored(Conformance):
    is_exclusive = False
    only = frozenset(CASES) - IN_LOOPS
    slow = (REPEATED - IN_LOOPS) | {
        # `TestBackupWorkers` has these on the same devices, where the step is cut in two besides.
        *(
            "embedding, places",
            "metric that shows its variable",
            "own functions",
            "transforms, clip rows after the sum",
        ),
        *("step with slices", "step decorated", "step that assigns", "ragged", "order of the data"),
        *("step mean_by_hand, one over", "step mean_by_hand, fewer examples than replicas"),
        *("global_clipnorm", "accumulation, clipnorm, ema", "loss scale, accumulation"),
        *("loss one per example, one over", "penalties, sum_over_batch_size, one example left"),
        # Workers, and replicas that span devices, have these.
        *("interrupted and resumed", "transforms, identity, rows"),
        *("fewer examples than replicas, eagerly", "parts of two sizes, unknown", "predictions of other dtypes"),
    }
    # "single batches" are a case.
    slow_tests = frozenset({"test_steps_on_single_batches"})

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
